"""TRL's `VLLMClient` with images, unmodified, against the server whose URL is the argument; one JSON line of answers by colour."""

import json
import sys

from PIL import Image
from trl_client import VLLMClient

client = VLLMClient(base_url=sys.argv[1])
sampling = {"n": 2, "max_tokens": 6, "logprobs": 0, "generation_kwargs": {"seed": 3, "ignore_eos": True}}
found = {}
for colour in ("red", "blue"):
    image = Image.new("RGB", (56, 56), colour)
    content = [{"type": "image", "image": image}]
    chat = client.chat(messages=[[{"role": "user", "content": content}]], **sampling)
    features = client.image_features([[image], None])
    (prompt,) = chat["prompt_ids"]
    made = client.generate(prompts=[prompt], features=features[:1], **sampling)
    found[colour] = {
        "without": features[1],
        "placeholders": features[0]["mm_placeholders"]["image"],
        "prompt": prompt,
        "chat": chat["completion_ids"],
        "generated": made["completion_ids"],
        "chat_logprobs": [[row[0] for row in rows] for rows in chat["logprobs"]],
        "generated_logprobs": [[row[0] for row in rows] for rows in made["logprobs"]],
    }
print(json.dumps(found))
