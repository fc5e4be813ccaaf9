"""The remote engine and the clients against peers that keep their promises and peers that do not, on real sockets."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import web
from tests.e2e.fleets import WAIT_S, MockWorker

from rollplane.client.admin import AdminClient
from rollplane.client.client import Client
from rollplane.engines.base import Engine
from rollplane.engines.mock.settings import MockSettings
from rollplane.engines.remote import RemoteEngine
from rollplane.errors import (
    DeadlineExceeded,
    EngineProtocolError,
    InvalidRequest,
    Overloaded,
    RollplaneError,
    TransportError,
    Unavailable,
    error_body,
)
from rollplane.protocol.answer import encode_msgpack
from rollplane.protocol.events import EndEvent, ErrorEvent, PromptEvent
from rollplane.protocol.hop import FRAMES, GENERATE_PATH, STATE_PATH, encode_frame
from rollplane.protocol.request import MSGPACK
from rollplane.testing.requests import answer, collect, folded, make_request, plan_of

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(**routes: Handler) -> AsyncIterator[str]:
    """A peer with the given handlers: `generate` (the hop), `state`, `rollout` (the public route), `engine` (admin)."""
    paths = {
        "generate": GENERATE_PATH,
        "state": STATE_PATH,
        "rollout": "/inference/v1/generate",
        "engine": "/engine/{_}",
    }
    app = web.Application()
    for name, handler in routes.items():
        app.router.add_route("*", paths[name], handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def worker_of(settings: MockSettings | None = None) -> AsyncIterator[MockWorker]:
    worker = MockWorker(settings)
    await worker.start()
    try:
        yield worker
    finally:
        await worker.kill()


def frames(body: bytes) -> Handler:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=body, content_type=FRAMES)

    return handler


async def test_a_remote_engine_is_an_engine_with_the_workers_own_answers() -> None:
    async with worker_of(MockSettings(sampling_mask=True)) as worker:
        engine = RemoteEngine(worker.url)
        assert repr(engine) == f"<RemoteEngine {worker.url} unknown: not asked yet>"
        with pytest.raises(Unavailable, match="never reached"):
            _ = engine.info
        await engine.start()
        try:
            assert isinstance(engine, Engine)
            assert engine.info == worker.worker.info
            assert engine.instance == worker.worker.instance_id
            assert (await engine.health()).alive
            request = make_request(max_tokens=6, logprobs=1, top_k=3, seed=4)
            response = await answer(engine, request)
            direct = await answer(worker.worker, request)
            assert response.choices[0].token_ids.tolist() == direct.choices[0].token_ids.tolist()
            stream = make_request(max_tokens=6, logprobs=1, top_k=3, seed=4, stream=True)
            events = await collect(engine, stream)
            assert len(events) > 3
            streamed = folded(events, plan_of(stream, engine.info))
            assert streamed.choices[0].token_ids.tolist() == direct.choices[0].token_ids.tolist()
            assert repr(engine) == f"<RemoteEngine {worker.url} ready initial inflight=0>"
        finally:
            await engine.close()


async def test_a_worker_that_ends_is_noticed_and_so_is_its_next_process() -> None:
    worker = MockWorker()
    await worker.start()
    port, url = worker.port, worker.url
    engine = RemoteEngine(url, poll_s=0.02)
    changed = asyncio.Event()
    engine.on_change(lambda _: changed.set())
    await engine.start()
    first = engine.instance

    async def until(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                changed.clear()
                await changed.wait()

    try:
        await worker.kill()
        await until(lambda: not engine.reachable)
        health = await engine.health()
        assert (health.alive, health.state) == (False, "failed")
        assert engine.info.model == "mock"
        worker = MockWorker(port=port)
        await worker.start()
        await until(lambda: engine.reachable)
        assert engine.instance == worker.worker.instance_id != first
    finally:
        await engine.close()
        await worker.kill()


async def test_nobody_at_the_address_is_a_transport_error_that_names_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    engine = RemoteEngine(f"http://127.0.0.1:{port}")
    try:
        with pytest.raises(TransportError, match=str(port)):
            await engine.start()
        with pytest.raises(TransportError, match=str(port)):
            await collect(engine, make_request())
        assert engine.inflight == 0
    finally:
        await engine.close()


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (encode_frame([PromptEvent(prompt_tokens=3)]), "early"),
        (b"", "early"),
        (encode_frame([EndEvent()])[:-1], "inside a frame"),
        (b"\x00\x00\x00\x01\xc1", "cannot be read"),
        (b"\xff\xff\xff\xff", "over the limit"),
    ],
)
async def test_an_answer_that_breaks_off_is_a_transport_error(body: bytes, says: str) -> None:
    async with serving(generate=frames(body)) as url:
        engine = RemoteEngine(url)
        try:
            with pytest.raises(TransportError, match=says):
                await collect(engine, make_request())
        finally:
            await engine.close()


async def test_an_error_in_a_frame_and_one_as_an_answer_are_the_same_typed_error() -> None:
    error = InvalidRequest("no such thing", param="sampling_params.top_k")
    event = ErrorEvent(status=error.status, error=error_body(error))

    async def refuse(request: web.Request) -> web.Response:
        return web.json_response({"error": error_body(error)}, status=error.status)

    for handler in (frames(encode_frame([event])), refuse):
        async with serving(generate=handler) as url:
            engine = RemoteEngine(url)
            try:
                with pytest.raises(InvalidRequest, match="no such thing") as found:
                    await collect(engine, make_request())
                assert found.value.param == "sampling_params.top_k"
            finally:
                await engine.close()


async def test_an_answer_of_another_kind_breaks_the_contract() -> None:
    async def page(request: web.Request) -> web.Response:
        return web.Response(text="<html>", content_type="text/html")

    async with serving(generate=page) as url:
        engine = RemoteEngine(url)
        try:
            with pytest.raises(EngineProtocolError, match="text/html"):
                await collect(engine, make_request())
        finally:
            await engine.close()


async def test_dropped_requests_end_at_once_and_the_worker_hears_of_it() -> None:
    async with worker_of(MockSettings(step_s=0.01)) as worker:
        engine = RemoteEngine(worker.url)
        try:
            tasks = [
                asyncio.create_task(collect(engine, make_request(max_tokens=3000, stream=s))) for s in (True, False)
            ]
            async with asyncio.timeout(WAIT_S):
                while worker.worker.live_requests < 2:  # noqa: ASYNC110 - the other side of a socket
                    await asyncio.sleep(0.005)
            assert engine.drop_requests("it was fenced") == 2
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert [(type(r), getattr(r, "message", None)) for r in results] == [(TransportError, "it was fenced")] * 2
            async with asyncio.timeout(WAIT_S):
                while worker.worker.live_requests:  # noqa: ASYNC110 - the other side of a socket
                    await asyncio.sleep(0.005)
        finally:
            await engine.close()


async def test_what_waits_for_a_worker_that_fell_silent_is_broken_off() -> None:
    """A stopped or cut-off worker sends no reset: only the silence of its state stream tells."""

    async def silent(request: web.Request) -> web.StreamResponse:
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    async with serving(generate=silent, state=silent) as url:
        engine = RemoteEngine(url, silent_s=0.2)
        try:
            waiting = asyncio.create_task(collect(engine, make_request()))
            calling = asyncio.create_task(engine.while_heard(engine.post_json("/nothing", {}, timeout_s=0.01)))
            held = asyncio.create_task(engine.while_heard(asyncio.get_running_loop().create_future()))
            await asyncio.wait({calling})
            assert isinstance(calling.exception(), RollplaneError)  # an answer of its own is not held back
            engine.follow()
            async with asyncio.timeout(WAIT_S):
                results = await asyncio.gather(waiting, held, return_exceptions=True)
            assert [type(result) for result in results] == [TransportError] * 2
            assert all("silent for 0.2 s" in str(result) for result in results)
            assert not engine.reachable
        finally:
            await engine.close()


# -- the rollout client ------------------------------------------------------------------------------------------------


def failing_first(errors: list[RollplaneError], body: bytes) -> tuple[list[bytes], Handler]:
    """A peer that answers with each error in turn, then with `body`; what was sent is kept."""
    sent: list[bytes] = []
    left = list(errors)

    async def handler(request: web.Request) -> web.Response:
        sent.append(await request.read())
        if left:
            error = left.pop(0)
            return web.json_response({"error": error_body(error)}, status=error.status)
        return web.Response(body=body, content_type=MSGPACK)

    return sent, handler


async def whole_answer(request_id: str) -> bytes:
    async with worker_of() as worker, Client(worker.url) as client:
        found = await client.generate([5, 6, 7], sampling_params={"max_tokens": 3}, request_id=request_id)
        return encode_msgpack(found)


async def test_errors_that_another_try_can_mend_are_repeated_with_the_same_body() -> None:
    quick = {"retry_after_s": 0.0}
    errors: list[RollplaneError] = [Overloaded("busy", **quick), Unavailable("soon", **quick), TransportError("lost")]
    sent, handler = failing_first(errors, await whole_answer("r"))
    async with serving(rollout=handler) as url, Client(url) as client:
        found = await client.generate([5, 6, 7], sampling_params={"max_tokens": 3}, request_id="r")
    assert found.choices[0].token_ids.size == 3
    assert len(sent) == 4
    assert len(set(sent)) == 1


@pytest.mark.parametrize("error", [InvalidRequest("no"), EngineProtocolError("7 for 8"), DeadlineExceeded("late")])
async def test_errors_that_another_try_cannot_mend_are_raised_at_once(error: RollplaneError) -> None:
    sent, handler = failing_first([error] * 4, b"")
    async with serving(rollout=handler) as url, Client(url) as client:
        with pytest.raises(type(error), match=error.message):
            await client.generate([5, 6, 7])
    assert len(sent) == 1


async def test_the_tries_end_and_the_last_error_is_raised() -> None:
    sent, handler = failing_first([Unavailable("soon", retry_after_s=0.0)] * 9, b"")
    async with serving(rollout=handler) as url, Client(url, attempts=3) as client:
        with pytest.raises(Unavailable, match="soon"):
            await client.generate([5, 6, 7])
    assert len(sent) == 3


async def test_a_deadline_bounds_all_tries_together() -> None:
    sent, handler = failing_first([Unavailable("later", retry_after_s=0.2)] * 99, b"")
    began = asyncio.get_running_loop().time()
    async with serving(rollout=handler) as url, Client(url, attempts=99) as client:
        with pytest.raises((Unavailable, DeadlineExceeded)):
            await client.generate([5, 6, 7], deadline_s=1.5)
    assert asyncio.get_running_loop().time() - began < 10.0
    assert 1 < len(sent) < 20


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        ({"request_id": "other"}, "request 'other'"),
        ({"choices": []}, "0 choices|indices"),
        ({"usage": {"prompt_tokens": 4, "completion_tokens": 3}}, "3 tokens"),
    ],
)
async def test_an_answer_that_breaks_the_contract_is_refused_by_the_client_too(
    spoil: dict[str, Any], says: str
) -> None:
    tree = msgspec.msgpack.decode(await whole_answer("r")) | spoil
    _, handler = failing_first([], msgspec.msgpack.encode(tree))
    async with serving(rollout=handler) as url, Client(url) as client:
        with pytest.raises(EngineProtocolError, match=says):
            await client.generate([5, 6, 7], request_id="r")


async def test_an_answer_cut_short_is_repeated() -> None:
    body = await whole_answer("r")
    tries = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal tries
        tries += 1
        if tries > 1:
            return web.Response(body=body, content_type=MSGPACK)
        response = web.StreamResponse(headers={"Content-Type": MSGPACK, "Content-Length": str(len(body))})
        await response.prepare(request)
        await response.write(body[: len(body) // 2])
        assert request.transport is not None
        request.transport.abort()
        return response

    async with serving(rollout=handler) as url, Client(url) as client:
        found = await client.generate([5, 6, 7], request_id="r")
    assert (found.choices[0].token_ids.size, tries) == (3, 2)


async def test_a_stream_that_breaks_off_is_an_error_and_never_repeated() -> None:
    tries = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal tries
        tries += 1
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"choices": [{"index": 0, "token_ids": [7]}]}\n\n')
        return response

    async with serving(rollout=handler) as url, Client(url) as client:

        async def read() -> None:
            async with client.stream([5, 6, 7]) as stream:
                async for _ in stream:
                    pass

        with pytest.raises(TransportError, match=r"before \[DONE\]"):
            await read()
    assert tries == 1


async def test_leaving_a_stream_early_aborts_it_on_the_worker() -> None:
    async with worker_of(MockSettings(step_s=0.01)) as worker, Client(worker.url) as client:
        async with client.stream([5, 6, 7], sampling_params={"max_tokens": 3000}) as stream:
            async for _ in stream:
                break
        async with asyncio.timeout(WAIT_S):
            while worker.worker.live_requests:  # noqa: ASYNC110 - the other side of a socket
                await asyncio.sleep(0.005)
        assert (await worker.engine.health()).running == 0
        with pytest.raises(EngineProtocolError, match="before the end"):
            _ = stream.response


async def test_models_and_health_of_a_worker() -> None:
    async with worker_of() as worker, Client(worker.url + "/v1") as client:
        assert [card["id"] for card in await client.models()] == ["mock"]
        assert await client.health()
        url = worker.url
    async with Client(url) as client:
        assert not await client.health()


async def test_an_admin_call_is_repeated_under_one_operation_id() -> None:
    sent: list[dict[str, Any]] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        sent.append(await request.json())
        if len(sent) == 1:
            assert request.transport is not None
            request.transport.abort()
        report = {"policy_version": "v1", "previous_version": "v0", "digest": "d", "tensors": 1, "bytes": 2}
        return web.json_response({"status": "ok", **report})

    async with serving(engine=handler) as url, AdminClient(url) as admin:
        assert (await admin.update_policy("/weights/v1")).policy_version == "v1"
    assert len(sent) == 2
    assert sent[0] == sent[1]
    assert sent[0]["operation_id"]
