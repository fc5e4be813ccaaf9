"""The internal hop over a real socket: the frontend's engine against the worker's routes."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.e2e.server_support import Served, eventually, serving, write_keys

from rollplane.engines.mock.engine import MockEngine
from rollplane.engines.mock.settings import MockSettings
from rollplane.engines.remote import RemoteEngine
from rollplane.errors import ContextOverflow, DeadlineExceeded, EngineFailed, InvalidRequest
from rollplane.protocol.hop import FRAMES, GENERATE_PATH, STATE_PATH, WIRE_HEADER, FrameReader, encode_hop_request
from rollplane.protocol.info import MoeShape
from rollplane.protocol.state import StateReader, decode_state
from rollplane.testing import ScriptedEngine, answer, collect, make_request, script_choice, script_error
from rollplane.worker import Worker

HOP = {"Content-Type": "application/msgpack", WIRE_HEADER: "1"}


@pytest.fixture
async def worker() -> AsyncIterator[Served]:
    settings = MockSettings(moe=MoeShape(layers=2, top_k=2, num_experts=8), step_s=0.001)
    async with serving(Worker(MockEngine(settings))) as served:
        yield served


@pytest.fixture
async def remote(worker: Served) -> AsyncIterator[RemoteEngine]:
    engine = RemoteEngine(worker.url)
    await engine.start()
    yield engine
    await engine.close()


async def test_a_remote_answer_equals_the_workers_own(worker: Served, remote: RemoteEngine) -> None:
    request = make_request(max_tokens=8, logprobs=1, seed=4)
    own = await answer(worker.service.engine, make_request(max_tokens=8, logprobs=1, seed=4))
    there = await answer(remote, request)

    assert there.choices[0].token_ids.tolist() == own.choices[0].token_ids.tolist()
    assert there.choices[0].routed_experts is not None
    assert there.served_by.worker == own.served_by.worker


async def test_a_unary_answer_is_one_frame(worker: Served) -> None:
    body = encode_hop_request(make_request(max_tokens=50, n=3))
    async with worker.session.post(worker.url + GENERATE_PATH, data=body, headers=HOP) as response:
        content = await response.read()
        assert response.content_type == FRAMES
        assert response.headers[WIRE_HEADER] == "1"

    assert len(list(FrameReader().feed(content))) == 1


async def test_a_stream_is_many_frames(worker: Served) -> None:
    # More than can be due at once, however long the loop was held up.
    body = encode_hop_request(make_request(max_tokens=500, ignore_eos=True, stream=True))
    async with worker.session.post(worker.url + GENERATE_PATH, data=body, headers=HOP) as response:
        frames = list(FrameReader().feed(await response.read()))

    assert len(frames) > 2


async def test_a_refusal_keeps_its_type_over_the_hop(remote: RemoteEngine) -> None:
    with pytest.raises(ContextOverflow, match="maximum context length"):
        await collect(remote, make_request([1] * 4096))


async def test_a_failure_in_the_middle_keeps_its_type() -> None:
    engine = ScriptedEngine(script_error(EngineFailed("it stumbled"), after=[1, 2]))
    async with serving(Worker(engine)) as served:
        remote = RemoteEngine(served.url)
        await remote.start()
        seen: list[Any] = []
        with pytest.raises(EngineFailed, match="it stumbled"):
            await _read_into(seen, remote)
        await remote.close()

    assert len(seen) == 3


async def test_the_deadline_travels(remote: RemoteEngine) -> None:
    with pytest.raises(DeadlineExceeded):
        await collect(remote, make_request(max_tokens=4000, ignore_eos=True, options={"deadline_s": 0.1}))


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_the_iterator_stops_the_worker(stream: bool) -> None:
    gate = asyncio.Event()
    engine = ScriptedEngine([script_choice([1], finish_reason=None), gate])
    async with serving(engine) as served:
        body = encode_hop_request(make_request(stream=stream))
        post = served.session.post(served.url + GENERATE_PATH, data=body, headers=HOP)
        if stream:
            async with post as response:
                await response.content.readany()
                response.close()
        else:
            asked = asyncio.create_task(post.__aenter__())

            async def running() -> bool:
                return len(engine.requests) == 1

            await eventually(running)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)

        async def closed() -> bool:
            return len(engine.closed_early) == 1

        await eventually(closed)


@pytest.mark.parametrize(
    ("headers", "status"),
    [({"Content-Type": "application/msgpack"}, 400), ({**HOP, WIRE_HEADER: "99"}, 400), ({WIRE_HEADER: "1"}, 415)],
)
async def test_another_wire_is_refused_before_the_body_is_read(
    worker: Served, headers: dict[str, str], status: int
) -> None:
    body = encode_hop_request(make_request())
    async with worker.session.post(worker.url + GENERATE_PATH, data=body, headers=headers) as response:
        assert response.status == status


async def test_a_hostile_envelope_is_a_400(worker: Served) -> None:
    for body in (b"", b"\x80", b"cposix\nsystem\n(S'true'\ntR.", b"\xff" * 64):
        async with worker.session.post(worker.url + GENERATE_PATH, data=body, headers=HOP) as response:
            assert response.status == 400


async def test_the_state_names_the_worker(worker: Served) -> None:
    async with worker.get(STATE_PATH) as response:
        state = decode_state(await response.read())

    assert state.info == worker.service.engine.info
    assert state.policy_version == "initial"
    assert "load_lora" in state.routes


async def test_the_watched_state_tells_a_pause_at_once(worker: Served) -> None:
    reader = StateReader()
    async with worker.get(f"{STATE_PATH}?watch=1") as response:
        assert response.content_type == FRAMES
        first = list(reader.feed(await response.content.readany()))
        async with worker.post("/engine/pause_generation", {}) as paused:
            assert paused.status == 200
        states = []
        async with asyncio.timeout(5):
            while not any(state.paused for state in states):
                states += list(reader.feed(await response.content.readany()))

    assert first[0].health.state == "ready"


async def test_the_watched_state_ends_when_the_process_stops(worker: Served) -> None:
    async with worker.get(f"{STATE_PATH}?watch=1") as response:
        await response.content.readany()
        worker.service.lifecycle.stopping.set()
        async with asyncio.timeout(5):
            await response.read()


async def test_the_hop_needs_an_admin_key(tmp_path: Any) -> None:
    keys = write_keys(tmp_path, data=["data-key"], admin=["admin-key"])
    async with serving(Worker(MockEngine()), keys=keys) as served:
        body = encode_hop_request(make_request(max_tokens=1))
        for key, status in (("data-key", 403), ("admin-key", 200)):
            headers = {**HOP, "Authorization": f"Bearer {key}"}
            async with served.session.post(served.url + GENERATE_PATH, data=body, headers=headers) as response:
                assert response.status == status


async def test_a_frontend_has_no_hop() -> None:
    async with (
        serving(ScriptedEngine(), role="frontend") as served,
        served.session.post(served.url + GENERATE_PATH, data=b"", headers=HOP) as response,
    ):
        assert response.status == 404


async def test_a_hop_with_a_bad_field_is_refused(remote: RemoteEngine) -> None:
    with pytest.raises(InvalidRequest, match="outside the vocabulary"):
        await collect(remote, make_request([10**9]))


async def _read_into(seen: list[Any], engine: RemoteEngine) -> None:
    async for event in engine.generate(make_request(stream=True)):
        seen.append(event)
