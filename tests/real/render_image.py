"""Prints what a renderer sends for one image: a JSON object of token_ids and features. Runs in vLLM's environment.

    python render_image.py MODEL_DIRECTORY WIDTH HEIGHT RED,GREEN,BLUE TOKEN_ID,TOKEN_ID,...

The token ids hold one image placeholder. Needs no engine: only vLLM's own processor of the model.
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
    model, width, height, colour, ids = sys.argv[1:]
    image = Image.new("RGB", (int(width), int(height)), tuple(int(each) for each in colour.split(",")))
    config = ModelConfig(model=model, max_model_len=4096, limit_mm_per_prompt={"image": 4, "video": 0})
    processor = MULTIMODAL_REGISTRY.create_processor(config)
    items = processor.info.parse_mm_data({"image": [image]})
    inputs = ProcessorInputs(prompt=[int(each) for each in ids.split(",")], mm_data_items=items)
    found = processor.apply(inputs, TimingContext(enabled=False))
    places = found["mm_placeholders"]["image"]
    png = io.BytesIO()
    image.save(png, "PNG")
    print(
        json.dumps(
            {
                "token_ids": found["prompt_token_ids"],
                "features": {
                    "mm_hashes": {"image": found["mm_hashes"]["image"]},
                    "mm_placeholders": {"image": [{"offset": p.offset, "length": p.length} for p in places]},
                    "kwargs_data": {"image": [encode_mm_kwargs_item(item) for item in found["mm_kwargs"]["image"]]},
                },
                "data_uri": "data:image/png;base64," + base64.b64encode(png.getvalue()).decode(),
            }
        )
    )


if __name__ == "__main__":
    main()
