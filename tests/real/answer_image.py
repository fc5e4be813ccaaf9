"""Prints vLLM's own in-process answer to one image: a JSON object of token_ids and logprobs. Runs in vLLM's environment.

    python answer_image.py MODEL_DIRECTORY WIDTH HEIGHT RED,GREEN,BLUE TOKEN_ID,TOKEN_ID,... MAX_TOKENS

The token ids hold one image placeholder. Greedy, in float32. Starts an engine: no other may run meanwhile.
"""

import json
import sys

from PIL import Image

from vllm import LLM, SamplingParams


def main() -> None:
    model, width, height, colour, ids, max_tokens = sys.argv[1:]
    image = Image.new("RGB", (int(width), int(height)), tuple(int(each) for each in colour.split(",")))
    llm = LLM(
        model, max_model_len=4096, enforce_eager=True, dtype="float32", limit_mm_per_prompt={"image": 4, "video": 0}
    )
    prompt = {"prompt_token_ids": [int(each) for each in ids.split(",")], "multi_modal_data": {"image": [image]}}
    sampling = SamplingParams(max_tokens=int(max_tokens), temperature=0.0, logprobs=0, ignore_eos=True)
    answer = llm.generate(prompt, sampling)[0].outputs[0]
    tokens = list(answer.token_ids)
    values = [row[token].logprob for row, token in zip(answer.logprobs, tokens, strict=True)]
    print(json.dumps({"token_ids": tokens, "logprobs": values}))


if __name__ == "__main__":
    main()
