"""Streams over a real socket: every side channel, aborts, slow readers, errors and hang-ups."""

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import numpy as np
import pytest
from tests.e2e.server_support import GENERATE, Served, data_of, eventually, serving, within

from rollplane.client.client import Client
from rollplane.engines.mock.engine import MockEngine
from rollplane.engines.mock.settings import Fault, MockSettings
from rollplane.errors import EngineFailed
from rollplane.protocol.events import EndEvent, PromptEvent
from rollplane.protocol.info import Capabilities, MoeShape
from rollplane.testing import ScriptedEngine, script_choice, script_error, script_of, scripted_info
from rollplane.worker import Worker

PROMPT = [5, 6, 7]
MOE = MoeShape(layers=2, top_k=2, num_experts=8)


@pytest.fixture
async def mock() -> AsyncIterator[Served]:
    engine = MockEngine(MockSettings(moe=MOE, sampling_mask=True))
    async with serving(Worker(engine)) as served:
        yield served


def ask(**sampling: Any) -> dict[str, Any]:
    return {"token_ids": PROMPT, "sampling_params": sampling}


def tokens_of(chunks: list[Any], index: int = 0) -> list[int]:
    choices = [choice for chunk in chunks if chunk != "[DONE]" for choice in chunk["choices"]]
    return [token for choice in choices if choice["index"] == index for token in choice["token_ids"]]


def terminals_of(chunks: list[Any]) -> list[dict[str, Any]]:
    choices = [choice for chunk in chunks if chunk != "[DONE]" for choice in chunk["choices"]]
    return [choice for choice in choices if choice["finish_reason"] is not None]


async def test_a_stream_folds_to_the_unary_answer(mock: Served) -> None:
    body = ask(max_tokens=24, logprobs=2, seed=11, top_k=20, n=2, temperature=1.0)
    unary = await mock.generate(body)
    chunks = await mock.chunks(body)

    for whole in unary["choices"]:
        (terminal,) = [choice for choice in terminals_of(chunks) if choice["index"] == whole["index"]]
        assert tokens_of(chunks, whole["index"]) == whole["token_ids"]
        for name in ("finish_reason", "stop_reason", "routed_experts", "sampling_mask", "policy_versions"):
            assert terminal[name] == whole[name], name
    assert chunks[-1] == "[DONE]"
    assert chunks[-2]["choices"] == []
    assert chunks[-2]["rollplane"] == unary["rollplane"]


async def test_logprobs_ride_with_their_tokens(mock: Served) -> None:
    chunks = await mock.chunks(ask(max_tokens=12, logprobs=1, top_k=5))

    for chunk in chunks[:-2]:
        for choice in chunk["choices"]:
            named = [entry["token"] for entry in choice["logprobs"]["content"]]
            assert named == [f"token_id:{token}" for token in choice["token_ids"]]


async def test_routes_and_masks_come_once_on_the_terminal_chunk(mock: Served) -> None:
    chunks = await mock.chunks(ask(max_tokens=12, top_k=5))

    holders = [
        c for chunk in chunks[:-1] for c in chunk["choices"] if c.get("routed_experts") or c.get("sampling_mask")
    ]
    assert len(holders) == 1
    assert holders[0]["finish_reason"] == "length"
    assert len(holders[0]["sampling_mask"]) == 12


async def test_our_client_folds_streams_and_unary_answers_alike(mock: Served) -> None:
    async with Client(mock.url) as client:
        options: dict[str, Any] = {"sampling_params": {"max_tokens": 16, "logprobs": 1, "seed": 5, "top_k": 9}}
        unary = await client.generate(PROMPT, **options)
        async with client.stream(PROMPT, **options) as stream:
            async for _ in stream:
                pass

    one, other = unary.choices[0], stream.response.choices[0]
    assert one.token_ids.tolist() == other.token_ids.tolist()
    assert one.routed_experts is not None
    assert other.routed_experts is not None
    assert one.routed_experts.array.tobytes() == other.routed_experts.array.tobytes()
    assert one.policy_versions == other.policy_versions
    assert stream.response.served_by == unary.served_by


async def test_usage_comes_only_when_asked(mock: Served) -> None:
    without = await mock.chunks(ask(max_tokens=4, top_k=5))
    at_end = await mock.chunks({**ask(max_tokens=4, top_k=5), "stream_options": {"include_usage": True}})
    always = await mock.chunks({**ask(max_tokens=4, top_k=5), "stream_options": {"continuous_usage_stats": True}})

    assert not any("usage" in chunk for chunk in without[:-1])
    assert [chunk for chunk in at_end[:-1] if "usage" in chunk] == [at_end[-2]]
    assert at_end[-2]["usage"]["completion_tokens"] == 4
    counts = [chunk["usage"]["completion_tokens"] for chunk in always[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == 4


async def test_the_final_prompt_ids_come_in_the_first_chunk(mock: Served) -> None:
    chunks = await mock.chunks({**ask(max_tokens=4, top_k=5), "return_token_ids": True})

    assert chunks[0]["prompt_token_ids"] == PROMPT
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:-1])


async def test_an_aborted_stream_ends_with_a_terminal_chunk_that_says_abort() -> None:
    engine = MockEngine(MockSettings(step_s=0.002))
    async with serving(Worker(engine)) as served:
        body = {**ask(max_tokens=4000, ignore_eos=True, logprobs=1), "stream": True, "request_id": "long"}
        async with served.post(GENERATE, body) as answer:
            seen = b""
            while seen.count(b"data: ") < 10:
                seen += await answer.content.readany()
            async with served.post("/abort_requests", {"request_ids": ["long"]}) as aborted:
                assert (await aborted.json())["aborted"] == 1
            seen += await answer.read()

    chunks = data_of(seen)
    (terminal,) = terminals_of(chunks)
    assert terminal["finish_reason"] == "abort"
    assert chunks[-1] == "[DONE]"
    assert 10 <= len(tokens_of(chunks)) < 4000


async def test_a_terminal_chunk_is_sent_without_tokens_too() -> None:
    events = [script_choice([], finish_reason="abort", logprobs=[]), EndEvent()]
    async with serving(ScriptedEngine(events)) as served:
        chunks = await served.chunks(ask(logprobs=1))

    (terminal,) = terminals_of(chunks)
    assert terminal["token_ids"] == []
    assert terminal["logprobs"] == {"content": []}
    assert terminal["finish_reason"] == "abort"


async def test_an_error_before_the_first_token_is_an_http_error() -> None:
    async with (
        serving(ScriptedEngine([PromptEvent(prompt_tokens=3), EngineFailed("it stumbled")])) as served,
        served.post(GENERATE, {**ask(), "stream": True}) as answer,
    ):
        assert answer.status == 502
        assert (await answer.json())["error"]["code"] == "engine_failed"


async def test_an_error_after_the_first_byte_is_an_event_and_no_done_follows() -> None:
    async with serving(ScriptedEngine(script_error(EngineFailed("it stumbled"), after=[4, 5]))) as served:
        chunks = await served.chunks(ask(max_tokens=9))

        assert tokens_of(chunks[:-1]) == [4, 5]
        assert chunks[-1]["error"] == {
            "message": "it stumbled",
            "type": "engine_error",
            "param": None,
            "code": "engine_failed",
        }
        assert await served.metric('rollplane_requests_total{outcome="engine_failed",stream="true"}') == 1


async def test_a_choice_that_breaks_the_contract_is_an_error_event() -> None:
    engine = MockEngine(MockSettings(moe=MOE, faults=(Fault(kind="routes_zero"),)))
    async with serving(Worker(engine)) as served:
        chunks = await served.chunks(ask(max_tokens=6))

    assert chunks[-1]["error"]["code"] == "engine_protocol_error"
    assert not terminals_of(chunks[:-1])


async def test_an_engine_that_stops_early_is_an_error_event() -> None:
    events = script_of([1, 2])[:-1]
    async with serving(ScriptedEngine(events)) as served:
        chunks = await served.chunks(ask())

    assert chunks[-1]["error"]["code"] == "engine_protocol_error"


async def test_prompt_logprobs_are_refused_on_a_stream(mock: Served) -> None:
    refused = await mock.generate({**ask(prompt_logprobs=1), "stream": True}, status=400)

    assert refused["error"]["param"] == "sampling_params.prompt_logprobs"


async def test_a_stream_is_never_msgpack(mock: Served) -> None:
    async with mock.post(GENERATE, {**ask(), "stream": True}, headers={"Accept": "application/msgpack"}) as answer:
        assert answer.status == 400
        assert "text/event-stream" in (await answer.json())["error"]["message"]


async def test_a_slow_reader_gets_merged_deltas_and_the_same_routes() -> None:
    """What was not taken in time costs one chunk: tokens are merged, routes come whole and once."""
    count = 6_000
    row = np.array([[0, 1], [2, 3]], dtype=np.uint8)
    routes = np.broadcast_to(row, (len(PROMPT) + count - 1, 2, 2)).copy()
    finished = asyncio.Event()

    def script(request: Any) -> list[Any]:
        values = [-0.5]
        deltas = [script_choice([i % 100], finish_reason=None, logprobs=values) for i in range(count)]
        terminal = script_choice([], logprobs=[], routed_experts=routes, policy_versions=[("v", 0)])
        return [PromptEvent(prompt_tokens=3), *deltas, terminal, EndEvent()]

    class Paced(ScriptedEngine):
        async def generate(self, request: Any) -> AsyncIterator[Any]:
            async for event in super().generate(request):
                yield event
                await asyncio.sleep(0)  # as an engine's steps do, let the writer run
            finished.set()

    info = scripted_info(
        max_model_len=100_000, moe=MOE, capabilities=Capabilities(routed_experts=True, logprobs_mode="sampling")
    )
    async with serving(Paced(script, info=info), sndbuf=8192) as served, _small_reader() as session:
        body = {**ask(max_tokens=count, logprobs=1), "stream": True}
        async with session.post(served.url + GENERATE, json=body) as answer:
            await within(20.0, finished)  # the engine is done before anything was read
            chunks = data_of(await answer.read())
        quick = await served.chunks(ask(max_tokens=count, logprobs=1))

    assert tokens_of(chunks) == [i % 100 for i in range(count)]
    assert len(chunks) < count / 2
    assert terminals_of(chunks)[0]["routed_experts"] == terminals_of(quick)[0]["routed_experts"]
    assert terminals_of(chunks)[0]["policy_versions"] == [["v", 0]]


def _small_reader() -> aiohttp.ClientSession:
    def make_socket(address: Any) -> socket.socket:
        sock = socket.socket(address[0], address[1], address[2])
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        return sock

    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(socket_factory=make_socket), read_bufsize=4096)


async def test_a_reader_that_takes_nothing_is_cut_off_and_the_work_stops() -> None:
    class Endless(ScriptedEngine):
        closed_iterator = asyncio.Event()

        async def generate(self, request: Any) -> AsyncIterator[Any]:
            try:
                while True:
                    yield script_choice([1] * 500, finish_reason=None, logprobs=[-0.5] * 500)
                    await asyncio.sleep(0.001)
            finally:
                self.closed_iterator.set()

    engine = Endless()
    async with serving(engine, sndbuf=8192, write_stall_s=0.3) as served, _small_reader() as session:
        body = {**ask(max_tokens=4000, logprobs=1), "stream": True}
        async with session.post(served.url + GENERATE, json=body):
            await within(20.0, engine.closed_iterator)


async def test_hanging_up_on_a_stream_stops_the_work() -> None:
    gate = asyncio.Event()
    engine = ScriptedEngine([script_choice([1], finish_reason=None), gate])
    async with serving(engine) as served:
        for _ in range(20):
            async with served.post(GENERATE, {**ask(max_tokens=8), "stream": True}) as answer:
                await answer.content.readany()
                answer.close()

        async def all_closed() -> bool:
            return len(engine.closed_early) == 20

        await eventually(all_closed)
        assert served.service.lifecycle.in_flight == 0


async def test_hanging_up_on_a_held_stream_stops_the_wait() -> None:
    async with serving(Worker(MockEngine())) as served:
        async with served.post("/engine/pause_generation", {}) as paused:
            assert paused.status == 200
        asked = asyncio.create_task(served.chunks(ask(max_tokens=2)))

        async def held() -> bool:
            return await served.metric("rollplane_requests_held ") == 1

        async def gone() -> bool:
            return await served.metric("rollplane_requests_held ") == 0

        await eventually(held)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await eventually(gone)


async def test_streaming_is_in_the_description(mock: Served) -> None:
    async with mock.get("/openapi.json") as answer:
        tree = await answer.json()

    answers = tree["paths"]["/inference/v1/generate"]["post"]["responses"]["200"]["content"]
    assert set(answers) == {"application/json", "text/event-stream", "application/msgpack"}
