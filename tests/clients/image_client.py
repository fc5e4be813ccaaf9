"""PyPI `renderers` with images, in vLLM's environment: `image_client.py URL TOKENIZER`. One JSON line: answers by colour and way.

The default way turns images into features here, with vLLM's own code; the other sends them as content parts.
"""

import asyncio
import base64
import io
import json
import sys
from typing import Any

from openai import AsyncOpenAI
from PIL import Image
from renderers import Qwen3VLRendererConfig, create_renderer
from renderers.base import load_tokenizer
from renderers.client import generate


def message(colour: str) -> dict[str, Any]:
    buffer = io.BytesIO()
    Image.new("RGB", (56, 56), colour).save(buffer, format="PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    return {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}],
    }


async def main(url: str, tokenizer: str) -> dict[str, Any]:
    renderer = create_renderer(load_tokenizer(tokenizer), Qwen3VLRendererConfig())
    found: dict[str, Any] = {}
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        for colour in ("red", "blue"):
            for way in ("features", "content_parts"):
                answer = await generate(
                    client=client,
                    renderer=renderer,
                    model="tiny",
                    messages=[message(colour)],
                    sampling_params={"temperature": 0.0, "max_tokens": 6},
                    process_multimodal=way == "features",
                )
                found[f"{colour} {way}"] = {
                    "ids": answer["completion_ids"],
                    "logprobs": answer["completion_logprobs"],
                    "prompt": len(answer["prompt_ids"]),
                }
    return found


print(json.dumps(asyncio.run(main(*sys.argv[1:3]))))
