"""Prints what a renderer sends for images: a JSON object, by name, of token_ids, features and data_uri. Runs in vLLM's
environment.

    python render_image.py MODEL_DIRECTORY WIDTH HEIGHT TOKEN_ID,TOKEN_ID,... NAME=RED,GREEN,BLUE ...

The token ids hold one image placeholder. For every name there is a second one, NAME-uint8: the same image with its pixels
as they are, for a server that normalises them itself. Needs no engine: only vLLM's own processor of the model.
"""

import base64
import io
import json
import sys

from PIL import Image
from vllm.config import ModelConfig
from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import encode_mm_kwargs_item
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.processing.context import TimingContext
from vllm.multimodal.processing.inputs import ProcessorInputs


def main() -> None:
    model, width, height, ids, *named = sys.argv[1:]
    prompt = [int(each) for each in ids.split(",")]
    out = {}
    for on_device in (False, True):
        config = ModelConfig(
            model=model,
            max_model_len=4096,
            dtype="float32",
            limit_mm_per_prompt={"image": 4, "video": 0},
            mm_device_do_normalize=on_device,
        )
        processor = MULTIMODAL_REGISTRY.create_processor(config)
        for each in named:
            name, _, colour = each.partition("=")
            image = Image.new("RGB", (int(width), int(height)), tuple(int(value) for value in colour.split(",")))
            items = processor.info.parse_mm_data({"image": [image]})
            found = processor.apply(ProcessorInputs(prompt=prompt, mm_data_items=items), TimingContext(enabled=False))
            places = found["mm_placeholders"]["image"]
            png = io.BytesIO()
            image.save(png, "PNG")
            out[f"{name}-uint8" if on_device else name] = {
                "token_ids": found["prompt_token_ids"],
                "features": {
                    "mm_hashes": {"image": found["mm_hashes"]["image"]},
                    "mm_placeholders": {"image": [{"offset": p.offset, "length": p.length} for p in places]},
                    "kwargs_data": {"image": [encode_mm_kwargs_item(item) for item in found["mm_kwargs"]["image"]]},
                },
                "data_uri": "data:image/png;base64," + base64.b64encode(png.getvalue()).decode(),
            }
    print(json.dumps(out))


if __name__ == "__main__":
    main()
