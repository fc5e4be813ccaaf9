"""What a stream and an aborted request may count on, through every hop."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import numpy as np
import pytest
from tests.e2e.hops import FRONTEND, FULL_HOPS, HOPS, Chain, chain
from tests.e2e.server_support import GENERATE, Served, data_of, eventually, strict_json
from tests.models import tiny

from rollplane.client.client import Client
from rollplane.engines.embedded.core import Core
from rollplane.engines.embedded.engine import EmbeddedEngine
from rollplane.engines.embedded.results import Emission
from rollplane.engines.embedded.settings import EmbeddedSettings
from rollplane.engines.mock.settings import MockSettings
from rollplane.protocol.artifacts import SamplingMask
from rollplane.protocol.info import MoeShape
from rollplane.protocol.response import Choice

PROMPT = [5, 6, 7]
MOE = MoeShape(layers=3, top_k=4, num_experts=512)


def ask(**sampling: Any) -> dict[str, Any]:
    return {"token_ids": PROMPT, "sampling_params": sampling}


def parts_of(chunks: list[Any]) -> list[dict[str, Any]]:
    return [choice for chunk in chunks if chunk != "[DONE]" for choice in chunk["choices"]]


async def abort(edge: Served, *request_ids: str) -> int:
    async with edge.post("/abort_requests", {"request_ids": list(request_ids)}) as answer:
        assert answer.status == 200, await answer.read()
        return int((await answer.json())["aborted"])


@pytest.mark.parametrize("hops", HOPS)
async def test_an_aborted_stream_says_so_in_its_last_chunk(hops: str) -> None:
    async with chain(hops, MockSettings(step_s=0.002)) as made:
        body = {**ask(max_tokens=4090, ignore_eos=True, logprobs=1), "stream": True, "request_id": "long"}
        async with made.edge.post(GENERATE, body) as answer:
            seen = b""
            while sum(len(part["token_ids"]) for part in parts_of(data_of(seen[: seen.rfind(b"\n\n") + 1]))) < 20:
                seen += await answer.content.readany()
            assert await abort(made.edge, "long") == 1
            seen += await answer.read()

    chunks = data_of(seen)
    parts = parts_of(chunks)
    assert chunks[-1] == "[DONE]"
    assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert parts[-1]["finish_reason"] == "abort"
    assert all(len(part["logprobs"]["content"]) == len(part["token_ids"]) for part in parts)
    assert 20 <= sum(len(part["token_ids"]) for part in parts) < 4090


@pytest.mark.parametrize("hops", HOPS)
async def test_aborted_unary_requests_answer_200_with_all_tokens_and_logprobs(hops: str) -> None:
    """Eight at once, aborted by others' calls while they run: partial rollouts are not lost."""
    async with chain(hops, MockSettings(step_s=0.002)) as made:
        ids = [f"r{i}" for i in range(8)]
        bodies = [{**ask(max_tokens=4000, ignore_eos=True, logprobs=1, seed=i), "request_id": ids[i]} for i in range(8)]
        asked = [asyncio.create_task(made.edge.generate(body)) for body in bodies]
        pace = {**ask(max_tokens=4000, ignore_eos=True), "stream": True}
        async with made.edge.post(GENERATE, pace) as running:
            await eventually(lambda: _runs(made, 9))
            for _ in range(10):  # ten chunks of a request that started last: the others have made tokens too
                await running.content.readuntil(b"\n\n")
            assert await abort(made.edge, *ids) == 8
        choices = [tree["choices"][0] for tree in await asyncio.gather(*asked)]

    for choice in choices:
        assert choice["finish_reason"] == "abort"
        assert len(choice["token_ids"]) == len(choice["logprobs"]["content"])
        assert 0 < len(choice["token_ids"]) < 4000


async def _runs(made: Chain, count: int) -> bool:
    return (await made.engine.health()).running >= count


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "streamed"])
@pytest.mark.parametrize("hops", FULL_HOPS)
async def test_an_abort_before_the_first_token_leaves_typed_empty_arrays(hops: str, stream: bool) -> None:
    """The prefill takes minutes, so no token can come first; a strict client reads the answer."""
    settings = MockSettings(moe=MOE, sampling_mask=True, prefill_tokens_per_s=0.01)
    asked: dict[str, Any] = {
        "sampling_params": {"max_tokens": 8, "logprobs": 1, "top_k": 4},
        "request_id": "early",
        "routed_experts": True,
        "sampling_mask": True,
    }
    async with chain(hops, settings) as made, Client(made.edge.url, attempts=1) as client:

        async def read() -> Choice:
            if not stream:
                return (await client.generate(PROMPT, **asked)).choices[0]
            async with client.stream(PROMPT, **asked) as answer:
                async for _ in answer:
                    pass
            return answer.response.choices[0]

        body = {**ask(max_tokens=8, logprobs=1, top_k=4), "request_id": "early-json"}
        body |= {"rollplane": {"routed_experts": True, "sampling_mask": True}}
        reading, raw = asyncio.create_task(read()), asyncio.create_task(made.edge.generate(body))
        await eventually(lambda: _aborted(made.edge, "early"))
        await eventually(lambda: _aborted(made.edge, "early-json"))
        choice, tree = await reading, (await raw)["choices"][0]

    assert (choice.finish_reason, choice.token_ids.size) == ("abort", 0)
    assert choice.logprobs is not None
    assert choice.logprobs.values.shape == (0,)
    assert choice.routed_experts is not None
    assert choice.routed_experts.array.shape == (0, MOE.layers, MOE.top_k)
    assert choice.routed_experts.array.dtype == np.uint16
    assert choice.sampling_mask is not None
    assert choice.sampling_mask.offsets.tolist() == [0]
    assert tree["logprobs"] == {"content": []}
    assert tree["routed_experts"] == {"data": "", "shape": [0, 3, 4], "start": 0, "dtype": "uint16"}
    assert tree["sampling_mask"] == []


async def _aborted(edge: Served, request_id: str) -> bool:
    return await abort(edge, request_id) == 1


def _small_reader() -> aiohttp.ClientSession:
    """A client whose socket holds little, so that what it does not read stays at the server."""

    def make_socket(address: Any) -> socket.socket:
        sock = socket.socket(address[0], address[1], address[2])
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        return sock

    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(socket_factory=make_socket), read_bufsize=4096)


@pytest.mark.parametrize("hops", FULL_HOPS)
async def test_routes_are_the_same_bytes_unary_streamed_and_read_late(hops: str) -> None:
    settings = MockSettings(moe=MOE, max_model_len=8192, step_s=0.0002)
    body = ask(max_tokens=3000, ignore_eos=True, seed=4, logprobs=1)
    async with chain(hops, settings, sndbuf=8192) as made, _small_reader() as session:
        unary = (await made.edge.generate(body))["choices"][0]
        quick = await made.edge.chunks(body)
        async with session.post(made.edge.url + GENERATE, json={**body, "stream": True}) as answer:
            await eventually(lambda: _idle(made))  # nothing is read before the engine has made everything
            slow = data_of(await answer.read())

    for chunks in (quick, slow):
        parts = parts_of(chunks)
        assert [i for part in parts for i in part["token_ids"]] == unary["token_ids"]
        assert [part for part in parts if part.get("routed_experts")] == [parts[-1]]
        assert parts[-1]["routed_experts"] == unary["routed_experts"]
    assert unary["routed_experts"]["shape"] == [len(PROMPT) + 2999, 3, 4]
    merged = max(len(part["token_ids"]) for part in parts_of(slow))
    assert merged > 500, "the late reader got no merged deltas, so this test would show nothing"


async def _idle(made: Chain) -> bool:
    return (await made.engine.health()).running == 0


def csr_of(rows: list[list[int]]) -> SamplingMask:
    flat = [i for row in rows for i in row]
    offsets = np.cumsum([0, *map(len, rows)])
    return SamplingMask(ids=np.array(flat, np.int32), offsets=offsets.astype(np.int32))


def check_mask(mask: SamplingMask, token_ids: list[int]) -> None:
    assert mask.offsets.size == len(token_ids) + 1
    assert mask.offsets[0] == 0
    assert mask.offsets[-1] == mask.ids.size
    assert (np.diff(mask.offsets) > 0).all()
    for i, token in enumerate(token_ids):
        assert token in mask.ids[mask.offsets[i] : mask.offsets[i + 1]].tolist()


class ReadAhead:
    """Lets an engine make so many steps more than its reader has taken deltas; any number outside a `with` block."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._permits: threading.Semaphore | None = None

    def __enter__(self) -> "ReadAhead":
        self._permits = threading.Semaphore(self._steps)
        return self

    def __exit__(self, *_: object) -> None:
        permits, self._permits = self._permits, None
        if permits is not None:
            permits.release()  # for a step that waits

    def took_one(self) -> None:
        if self._permits is not None:
            self._permits.release()

    def wait(self) -> None:
        if self._permits is not None:
            assert self._permits.acquire(timeout=30), "the reader took nothing"


class PacedEngine(EmbeddedEngine):
    """Steps as far as `ahead` lets it."""

    def __init__(self, settings: EmbeddedSettings, *, ahead: ReadAhead) -> None:
        super().__init__(settings)
        self._ahead = ahead

    def _build(self) -> Core:
        core = super()._build()
        step = core.step

        def paced() -> list[Emission]:
            self._ahead.wait()
            return step()

        core.step = paced  # type: ignore[method-assign]
        return core


@contextlib.asynccontextmanager
async def _masked(hops: str, engine: str, *, ahead: ReadAhead) -> AsyncIterator[Chain]:
    if engine == "mock":
        async with chain(hops, MockSettings(sampling_mask=True, vocab_tokens=512, step_s=0.01)) as made:
            yield made
    else:
        settings = EmbeddedSettings(model=str(tiny.shared_model("qwen3", layers=2)), threads=1)
        async with chain(hops, PacedEngine(settings, ahead=ahead)) as made:
            yield made


@pytest.mark.parametrize("engine", ["mock", "embedded"])
@pytest.mark.parametrize("hops", FULL_HOPS)
async def test_masks_keep_their_invariants_unary_streamed_and_folded(hops: str, engine: str) -> None:
    sampling = {"top_p": 0.9, "top_k": 50, "seed": 3, "n": 2, "max_tokens": 30, "ignore_eos": True}
    body = {**ask(**sampling), "rollplane": {"sampling_mask": True}}
    ahead = ReadAhead(4)
    async with _masked(hops, engine, ahead=ahead) as made, Client(made.edge.url) as client:
        unary = (await made.edge.generate(body))["choices"]
        chunks = await made.edge.chunks(body)
        packed = await client.generate(PROMPT, sampling_params=sampling, sampling_mask=True)
        deltas = []
        with ahead:
            async with client.stream(PROMPT, sampling_params=sampling, sampling_mask=True) as stream:
                async for delta in stream:
                    deltas.append(delta)
                    ahead.took_one()
        folded = stream.response

    assert len(deltas) > 2  # of two choices
    terminals = {part["index"]: part for part in parts_of(chunks) if part["finish_reason"] is not None}
    widths = set()
    for choice in unary:
        index, ids = choice["index"], choice["token_ids"]
        whole = csr_of(choice["sampling_mask"])
        check_mask(whole, ids)
        assert terminals[index]["sampling_mask"] == choice["sampling_mask"]
        for mask in (packed.choices[index].sampling_mask, folded.choices[index].sampling_mask):
            assert mask is not None
            check_mask(mask, ids)
            assert (mask.ids.tobytes(), mask.offsets.tobytes()) == (whole.ids.tobytes(), whole.offsets.tobytes())
        widths |= set(np.diff(whole.offsets).tolist())
    assert max(widths) <= 50
    assert len(widths) > 1 or engine == "mock", "rows of one width would not show rebased offsets"


async def test_a_strict_reader_takes_every_chunk_of_a_stream_with_infinite_alternatives() -> None:
    async with chain(FRONTEND, MockSettings()) as made:
        body = {**ask(allowed_token_ids=[7], logprobs=5, max_tokens=3), "stream": True}
        async with made.edge.post(GENERATE, body) as answer:
            content = await answer.read()

    lines = [line[6:] for line in content.split(b"\n") if line.startswith(b"data: {")]
    trees = [strict_json(line) for line in lines]
    tops = [
        top["logprob"]
        for part in parts_of(trees)
        for entry in part["logprobs"]["content"]
        for top in entry["top_logprobs"]
    ]
    assert tops.count(-9999.0) == trees[-1]["rollplane"]["floored_logprobs"] > 0
