"""What it costs to turn one finished vLLM `RequestOutput` into the bytes of an answer: ours beside vLLM's own response models.

    .venv-vllm/bin/python bench/request_output.py [--prompt 4096] [--output 4096] [--rounds 15]

One sample: routes of 48 layers x 8 experts for every token (3 MB as uint8), a sampling mask of 8 ids per generated token,
with and without one logprob per token, as vLLM's engine leaves it (`FlatLogprobs`). Theirs: `ServingTokens`, which makes its
pydantic models, and the JSON that its route makes of them. Ours: the conversion, the fold with every check of the response
contract, and the same answer as JSON (structured routes) or msgpack. CPU milliseconds of one process, medians of rounds in
which they take turns. No engine runs.
"""

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from fastapi.responses import JSONResponse
from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.outputs import CompletionOutput, RequestOutput, SamplingMask

from rollplane.engines.vllm import convert
from rollplane.engines.vllm.convert import ChoicePlan
from rollplane.fold import Fold, FoldPlan
from rollplane.protocol.answer import encode_pieces, json_pieces
from rollplane.protocol.events import EndEvent, PromptEvent
from rollplane.protocol.info import MoeShape
from rollplane.protocol.pieces import Piece, size_of

LAYERS, TOP_K, EXPERTS, VOCABULARY, MASK = 48, 8, 128, 150_000, 8


def make_output(prompt: int, output: int, *, logprobs: bool) -> RequestOutput:
    """A finished request as vLLM's engine returns it."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCABULARY, output).tolist()
    rows = rng.permuted(np.tile(np.arange(EXPERTS, dtype=np.uint8), (512, LAYERS, 1)), axis=2)[:, :, :TOP_K]
    masks = [sorted({token, *((token + 1 + i * 17) % VOCABULARY for i in range(MASK - 1))}) for token in tokens]
    flat = FlatLogprobs()
    for token, value in zip(tokens, -rng.random(output), strict=True):
        flat.append({token: Logprob(logprob=float(np.float32(value)), rank=1)})
    return RequestOutput(
        request_id="r",
        prompt=None,
        prompt_token_ids=list(range(prompt)),
        prompt_logprobs=None,
        outputs=[
            CompletionOutput(
                index=0,
                text="",
                token_ids=tokens,
                cumulative_logprob=-1.0,
                logprobs=flat if logprobs else None,
                routed_experts=np.ascontiguousarray(np.resize(rows, (prompt + output - 1, LAYERS, TOP_K))),
                sampling_mask=SamplingMask(masks),
                finish_reason="length",
            )
        ],
        finished=True,
    )


def theirs(made: RequestOutput, *, logprobs: bool) -> Callable[[], int]:
    """vLLM's way: bytes of its answer."""
    serving = object.__new__(ServingTokens)
    serving.enable_prompt_tokens_details = serving.enable_log_outputs = False
    serving.request_logger = None
    serving.return_tokens_as_token_ids = True
    params = SimpleNamespace(logprobs=1 if logprobs else None, n=1)
    request = SimpleNamespace(sampling_params=params, return_token_ids=False, _response_mm_placeholders=None)

    async def outputs() -> AsyncIterator[RequestOutput]:
        yield made

    async def answer() -> int:
        response = await serving.serve_tokens_full_generator(request, outputs(), "r", "m", SimpleNamespace())
        return len(JSONResponse(content=response.model_dump()).body)

    return lambda: asyncio.run(answer())


def ours(made: RequestOutput, *, logprobs: bool, write: Callable[[Any], list[Piece]]) -> Callable[[], int]:
    """Our way: bytes of the same answer."""
    prompt = len(made.prompt_token_ids)
    plan = ChoicePlan(
        prompt_tokens=prompt,
        logprobs=logprobs,
        alternatives=1 if logprobs else 0,
        fixed_ids=False,
        routes=True,
        routes_start=0,
        mask=True,
        moe=MoeShape(layers=LAYERS, top_k=TOP_K, num_experts=EXPERTS),
    )
    whole = FoldPlan(
        request_id="r", model="m", choices=1, prompt_tokens=prompt, logprobs=logprobs, routes=True, mask=True
    )

    def answer() -> int:
        fold = Fold(whole)
        fold.add(PromptEvent(prompt_tokens=prompt))
        fold.add(convert.read_ending(made.outputs[0], plan, index=0, sent=0, spans=[("v", 0)])[0])
        fold.add(EndEvent())
        return size_of(write(fold.response()))

    return answer


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--output", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    for logprobs in (False, True):
        made = make_output(args.prompt, args.output, logprobs=logprobs)
        ways = {
            "vLLM's models": theirs(made, logprobs=logprobs),
            "ours, JSON": ours(made, logprobs=logprobs, write=json_pieces),
            "ours, msgpack": ours(made, logprobs=logprobs, write=encode_pieces),
        }
        taken: dict[str, list[float]] = {name: [] for name in ways}
        sizes = {name: way() for name, way in ways.items()}
        for _ in range(args.rounds):
            for name, way in ways.items():
                began = time.process_time()
                way()
                taken[name].append((time.process_time() - began) * 1e3)
        first = statistics.median(taken["vLLM's models"])
        print(
            f"{args.prompt}/{args.output}, routes and masks{', one logprob per token' if logprobs else ''}; "
            f"{args.rounds} rounds, load average {os.getloadavg()[0]:.1f}"
        )
        for name, found in taken.items():
            cost = statistics.median(found)
            print(f"  {name:14} {cost:7.1f} ms CPU, {sizes[name] / 1e6:5.1f} MB, {cost / first:.2f} of vLLM's")


if __name__ == "__main__":
    main()
