"""Load on one stack: so many requests at once over kept connections, and what came back."""

import asyncio
import base64
import itertools
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import aiohttp
import msgspec
import numpy as np

from rollplane.protocol.answer import decode_msgpack

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.models.qwen_features import image_fields, payload

from stacks import MODEL

Mode = Literal["unary", "msgpack", "stream", "features", "routes", "masks"]
PATH: Final = "/inference/v1/generate"
BODIES: Final = 8
"""Different prompts of one load: a server that cached whole requests would show."""
IMAGE_GRID: Final = (1, 30, 28)
"""Patches of an image whose pixels are 4 MB; it takes a quarter as many tokens."""
IMAGE_TOKENS: Final = IMAGE_GRID[0] * IMAGE_GRID[1] * IMAGE_GRID[2] // 4


@dataclass(frozen=True)
class Load:
    """`prompt` and `output` in tokens; `concurrency` requests at once, `requests` per round."""

    prompt: int
    output: int
    concurrency: int
    requests: int

    def __str__(self) -> str:
        return f"{self.prompt}/{self.output}"


@dataclass
class Outcome:
    """One round. Times in seconds, `sizes` in bytes, `decode_s`: of one answer by the client."""

    wall_s: float
    latencies_s: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    decode_s: float = 0.0


def bodies(load: Load, mode: Mode, *, model: str = MODEL) -> list[bytes]:
    """Request bodies, each with a prompt of its own."""
    sampling = {"max_tokens": load.output, "ignore_eos": True, "logprobs": 1, "temperature": 1.0}
    fields: dict[str, Any] = {}
    if mode == "features":
        item = base64.b64encode(payload(**image_fields(grid=IMAGE_GRID))).decode()
        fields["features"] = {
            "mm_hashes": {"image": ["one"]},
            "mm_placeholders": {"image": [{"offset": 8, "length": IMAGE_TOKENS}]},
            "kwargs_data": {"image": [item]},
        }
    if mode in ("routes", "masks"):
        fields["rollplane"] = {"routed_experts": mode == "routes", "sampling_mask": mode == "masks"}
        sampling |= {"top_k": 8} if mode == "masks" else {}
    if mode == "stream":
        fields["stream"] = True
    out = []
    for i in range(BODIES):
        prompt = [300 + (i * 53 + k * 31) % 700 for k in range(load.prompt)]
        whole = {"model": model, "token_ids": prompt, "sampling_params": sampling | {"seed": i}, **fields}
        out.append(json.dumps(whole).encode())
    return out


async def run(
    session: aiohttp.ClientSession,
    url: str,
    sent: list[bytes],
    load: Load,
    mode: Mode,
    *,
    requests: int,
    seconds: float = 0.0,
) -> Outcome:
    """One round: so many requests, and then more until so much time is over.

    Raises:
        RuntimeError: an answer that is none, or the wrong number of tokens.
    """
    headers = {"content-type": "application/json"}
    if mode == "msgpack":
        headers["accept"] = "application/msgpack"
    left = itertools.cycle(sent)
    count = itertools.count()
    outcome = Outcome(wall_s=0.0)
    last = b""

    async def client() -> None:
        nonlocal last
        while next(count) < requests or time.perf_counter() < ends_s:
            began_s = time.perf_counter()
            async with session.post(f"{url}{PATH}", data=next(left), headers=headers) as answered:
                found = await answered.read()
            outcome.latencies_s.append(time.perf_counter() - began_s)
            outcome.sizes.append(len(found))
            last = found
            if answered.status != 200:
                raise RuntimeError(f"{url} answered {answered.status}: {found[:300]!r}")

    began_s = time.perf_counter()
    ends_s = began_s + seconds
    async with asyncio.TaskGroup() as group:
        for _ in range(min(load.concurrency, requests)):
            group.create_task(client())
    outcome.wall_s = time.perf_counter() - began_s
    tokens, outcome.decode_s = read(last, mode)
    if tokens != load.output:
        raise RuntimeError(f"{url} answered {tokens} tokens, not {load.output}: {last[:300]!r}")
    return outcome


def read(answer: bytes, mode: Mode) -> tuple[int, float]:
    """Tokens of an answer, and the CPU seconds that a client needs to read it."""
    began_s = time.process_time()
    if mode == "msgpack":
        tokens = int(decode_msgpack(answer).choices[0].token_ids.size)
    elif mode == "stream":
        chunks = [msgspec.json.decode(line[6:]) for line in answer.split(b"\n\n") if line.startswith(b"data: {")]
        if not answer.rstrip().endswith(b"[DONE]"):
            raise RuntimeError(f"a stream ended with {answer[-200:]!r}")
        tokens = sum(len(choice["token_ids"]) for chunk in chunks for choice in chunk.get("choices", ()))
    else:
        found = msgspec.json.decode(answer)["choices"][0]
        tokens = len(found["token_ids"])
        if len(found["logprobs"]["content"]) != tokens:
            raise RuntimeError(f"{len(found['logprobs']['content'])} logprobs for {tokens} tokens")
        if mode == "routes":
            np.frombuffer(base64.b64decode(found["routed_experts"]["data"]), dtype=found["routed_experts"]["dtype"])
    return tokens, time.process_time() - began_s


def percentile(values: list[float], share: float) -> float:
    """The smallest value that `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def median(values: list[float]) -> float:
    """The median."""
    return statistics.median(values)
