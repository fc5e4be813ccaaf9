"""Prints the answers of our vLLM engine in process to some requests: a JSON list. Runs in vLLM's environment.

    python answer_text.py MODEL_DIRECTORY BODY...

Each body is a Generate request in JSON. One at a time, in float32. Starts an engine: no other may run meanwhile.
"""

import asyncio
import json
import sys

from rollplane.engines.vllm.inprocess import VllmEngine
from rollplane.engines.vllm.settings import VllmSettings
from rollplane.protocol.request import parse_request
from rollplane.testing import answer


async def answers(model: str, bodies: list[str]) -> list[dict[str, object]]:
    engine = VllmEngine(
        VllmSettings(model=model, dtype="float32", max_model_len=4096, engine_args=("--enforce-eager",))
    )
    await engine.start()
    try:
        found = []
        for body in bodies:
            choice = (await answer(engine, parse_request(body.encode()))).choices[0]
            found.append(
                {
                    "token_ids": choice.token_ids.tolist(),
                    "logprobs": [] if choice.logprobs is None else choice.logprobs.values.tolist(),
                    "finish_reason": choice.finish_reason,
                }
            )
        return found
    finally:
        await engine.close()


def main() -> None:
    model, *bodies = sys.argv[1:]
    print(json.dumps(asyncio.run(answers(model, bodies))))


if __name__ == "__main__":
    main()
