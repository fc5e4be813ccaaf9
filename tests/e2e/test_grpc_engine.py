"""The vLLM gRPC engine and a mock vLLM server on real sockets: what the contract suite does not look at."""

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from aiohttp import web
from tests.bad_files import bad_adapters
from tests.models.qwen_features import image_fields, payload
from tests.models.tiny import shared_model
from tests.waiting import until

from rollplane.engines.grpc import services
from rollplane.engines.grpc.channels import ChannelPool
from rollplane.engines.grpc.engine import GrpcEngine
from rollplane.engines.grpc.mock_server import MockVllmServer
from rollplane.engines.grpc.settings import GrpcSettings
from rollplane.engines.grpc.startup import probe
from rollplane.engines.mock.engine import MockEngine
from rollplane.engines.mock.settings import BREACHES, Fault, MockSettings
from rollplane.errors import (
    EngineDied,
    EngineFailed,
    EngineProtocolError,
    InvalidRequest,
    NotFound,
    PayloadTooLarge,
    TransportError,
)
from rollplane.protocol.admin import FlushReport, PauseReport
from rollplane.protocol.events import ChoiceEvent, PromptEvent
from rollplane.protocol.features import MediaItem
from rollplane.testing import answer, collect, make_request, watching
from rollplane.worker import Worker

PACED = MockSettings(vocab_tokens=1024, step_s=0.001)


@asynccontextmanager
async def running(
    mock: MockSettings | None = None, *, settings: dict[str, Any] | None = None, **server: Any
) -> AsyncIterator[tuple[GrpcEngine, MockVllmServer]]:
    served = MockVllmServer(MockEngine(mock or MockSettings(vocab_tokens=1024)), **server)
    await served.start()
    engine = GrpcEngine(
        GrpcSettings(**{"endpoint": f"127.0.0.1:{served.port}", "vocab_size": 1024, **(settings or {})})
    )
    try:
        await engine.start()
        yield engine, served
    finally:
        await engine.close()
        await served.stop()


# -- which call, and what travels with it ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "methods"),
    [
        ({}, ["Generate"]),
        ({"stream": True}, ["GenerateStream"]),
        ({"options": {"exact_spans": True}}, ["GenerateStream"]),
        ({"n": 3}, ["Generate"] * 3),
    ],
)
async def test_a_unary_request_is_a_unary_call(asked: dict[str, Any], methods: list[str]) -> None:
    async with running() as (engine, server):
        await answer(engine, make_request(max_tokens=4, **asked))

        assert [call.method for call in server.calls] == methods


async def test_a_whole_answer_over_the_streaming_call_is_the_unary_one() -> None:
    async with running() as (engine, _):
        asked: dict[str, Any] = {"max_tokens": 30, "seed": 3, "logprobs": 2, "ignore_eos": True}
        unary = await collect(engine, make_request(**asked))
        counted = await collect(engine, make_request(options={"exact_spans": True}, **asked))

        assert [type(event) for event in counted] == [type(event) for event in unary]
        assert msgspec.msgpack.encode(str(counted[1])) == msgspec.msgpack.encode(str(unary[1]))


async def test_the_chosen_rank_and_the_token_travel_as_metadata(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    async with running(settings={"token_file": str(token)}) as (engine, server):
        await answer(engine, make_request(max_tokens=1, fields={"data_parallel_rank": 0}))
        await answer(engine, make_request(max_tokens=1))

        assert server.calls[0].metadata == {"authorization": "Bearer s3cret", "x-data-parallel-rank": "0"}
        assert "x-data-parallel-rank" not in server.calls[1].metadata


async def test_tls_and_call_credentials(tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    assert openssl is not None, "openssl makes the test's certificate"
    key, certificate, token = tmp_path / "key", tmp_path / "cert", tmp_path / "token"
    token.write_text("s3cret")
    make = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-out", str(certificate)]
    make += ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    await asyncio.to_thread(subprocess.run, make, check=True, capture_output=True)
    credentials = grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())])
    tls = {"tls": True, "tls_ca_file": str(certificate), "tls_server_name": "localhost", "token_file": str(token)}
    async with running(settings=tls, credentials=credentials) as (engine, server):
        await answer(engine, make_request(max_tokens=1))

        assert server.calls[0].metadata["authorization"] == "Bearer s3cret"

        stranger = GrpcEngine(GrpcSettings(endpoint=engine.settings.endpoint, tls=True, start_timeout_s=0.5))
        with pytest.raises(EngineDied, match="not healthy"):
            await stranger.start()


async def test_features_arrive_and_are_checked() -> None:
    item = MediaItem(modality="image", producer_hash="theirs", offset=1, length=2, kwargs=payload(**image_fields()))
    async with running(settings={"mm_device_do_normalize": False}) as (engine, server):
        await answer(engine, make_request(max_tokens=1, fields={"features": [item]}))

        (media,) = server.calls[0].request.media
        assert media.features.kwargs == item.kwargs
        media.features.length = 9
        call = engine._pool.lanes[0].inference.Generate(server.calls[0].request)  # type: ignore[union-attr]
        with pytest.raises(grpc.aio.AioRpcError, match=r"\[1, 10\) is no range"):
            await call


async def test_a_payload_is_read_before_anything_is_sent() -> None:
    item = MediaItem(modality="image", producer_hash="theirs", offset=1, length=2, kwargs=b"\x80")
    async with running() as (engine, server):
        with pytest.raises(InvalidRequest, match="holds no fields"):
            await answer(engine, make_request(max_tokens=1, fields={"features": [item]}))

        assert not server.calls


async def test_a_worker_lists_no_update_from_disk_and_refuses_one_by_name(tmp_path: Path) -> None:
    async with running() as (engine, _):
        worker = Worker(engine)
        await worker.start()
        assert {"stage_weights", "update_weights_from_disk", "apply_staged_weights"}.isdisjoint(worker.routes())
        with pytest.raises(InvalidRequest, match="update_weights_from_disk is not offered by a vLLM gRPC server"):
            await worker.update_from_disk(str(tmp_path), version="v1")


# -- start -----------------------------------------------------------------------------------------------------------


async def test_the_start_waits_for_both_services() -> None:
    server = MockVllmServer(MockEngine())
    await server.start()
    await server.set_health(serving=False)
    engine = GrpcEngine(GrpcSettings(endpoint=f"127.0.0.1:{server.port}"))
    starting = asyncio.create_task(engine.start())
    await asyncio.wait([starting], timeout=0.1)
    assert not starting.done()

    await server.set_health(serving=True)
    await starting
    assert (await engine.health()).state == "ready"
    await engine.close()
    await server.stop()


async def test_a_start_that_takes_too_long_says_what_was_seen() -> None:
    server = MockVllmServer(MockEngine())
    await server.start()
    await server.set_health(serving=False)
    engine = GrpcEngine(GrpcSettings(endpoint=f"127.0.0.1:{server.port}", start_timeout_s=0.5))

    with pytest.raises(EngineDied, match=r"not healthy within 0\.5 s: health NOT_SERVING"):
        await engine.start()
    await server.stop()


@asynccontextmanager
async def http_side(path: str, answered: Any, *, status: int = 200) -> AsyncIterator[str]:
    async def handle(request: web.Request) -> web.Response:
        return web.Response(
            body=answered if isinstance(answered, bytes) else msgspec.json.encode(answered), status=status
        )

    app = web.Application()
    app.router.add_get(path, handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield "http://{}:{}".format(*runner.addresses[0])
    finally:
        await runner.cleanup()


async def test_an_old_servers_world_size_comes_from_below_the_http_prefix() -> None:
    async with (
        http_side("/prefix/get_world_size", {"world_size": 6}) as url,
        running(settings={"http_endpoint": url + "/prefix/"}, world_size=0) as (engine, _),
    ):
        assert engine.info.world_size == 6


@pytest.mark.parametrize(
    ("answered", "status", "why"),
    [
        ({"world_size": 0}, 200, "world size 0"),
        ({"world_size": -1}, 200, "world size -1"),
        ({"world_size": "2"}, 200, "not a world size"),
        ({"size": 2}, 200, "not a world size"),
        (b"<html>", 200, "not a world size"),
        ({}, 404, "answered 404.*VLLM_SERVER_DEV_MODE"),
        ({}, 302, "answered 302"),
    ],
)
async def test_an_http_answer_that_is_no_world_size_refuses_the_start(answered: Any, status: int, why: str) -> None:
    async with http_side("/get_world_size", answered, status=status) as url:
        with pytest.raises(InvalidRequest, match=why):
            async with running(settings={"http_endpoint": url}, world_size=0):
                pass


# -- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "kind", sorted(BREACHES - {"no_end", "nan_logprob"} - {b for b in BREACHES if "rout" in b or "mask" in b})
)
async def test_an_answer_that_breaks_the_wires_promises_is_refused(kind: Any, stream: bool) -> None:
    async with running(MockSettings(vocab_tokens=1024, faults=(Fault(kind=kind),))) as (engine, _):
        with pytest.raises(EngineProtocolError):
            await answer(engine, make_request(max_tokens=6, logprobs=1, stream=stream))

        await answer(engine, make_request(max_tokens=6, logprobs=1, stream=stream))


def spoil(monkeypatch: pytest.MonkeyPatch, kind: str, data: bytes) -> None:
    """A server that starts after this sends these bytes in place of every message of a kind."""
    serialize = services._serialize

    def spoiled(message: Any) -> bytes:
        return data if type(message).__name__ == kind else serialize(message)

    monkeypatch.setattr(services, "_serialize", spoiled)


@pytest.mark.parametrize("asked", [{}, {"options": {"exact_spans": True}}, {"stream": True}, {"n": 2}])
@pytest.mark.parametrize("size", [1, 5000])
async def test_an_answer_that_protobuf_cannot_read_is_a_breach(
    asked: dict[str, Any], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, "GenerateResponse", b"\xff" * size)
    async with running() as (engine, _):
        with pytest.raises(EngineProtocolError, match=r"choice \d: an answer that protobuf cannot read"):
            await collect(engine, make_request(max_tokens=4, logprobs=1, **asked))

        assert (await engine.health()).alive


async def test_an_answer_to_a_control_call_that_protobuf_cannot_read_is_a_breach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spoil(monkeypatch, "PauseGenerationResponse", b"\xff")
    async with running() as (engine, _):
        with pytest.raises(EngineProtocolError, match="PauseGeneration: an answer that protobuf cannot read"):
            await engine.pause("keep")


@pytest.mark.parametrize(
    ("data", "says"),
    [(b"\xff", "an answer on its health that protobuf cannot read"), (b"\x08\x09", "health 9")],
    ids=["no message", "a status of another release"],
)
async def test_an_answer_on_health_that_cannot_be_read_is_not_serving(data: bytes, says: str) -> None:
    async def check(_: Any, __: Any) -> bytes:
        return data

    server = grpc.aio.server()
    methods = {"Check": grpc.unary_unary_rpc_method_handler(check)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("grpc.health.v1.Health", methods)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    pool = ChannelPool(GrpcSettings(endpoint=f"127.0.0.1:{port}"))
    try:
        assert await probe(pool, "any", timeout_s=5) == says
    finally:
        await pool.close()
        await server.stop(None)


async def test_a_failure_of_one_request_is_its_own() -> None:
    async with running(MockSettings(faults=(Fault(kind="fail", at=1),))) as (engine, _):
        with pytest.raises(EngineFailed):
            await answer(engine, make_request(max_tokens=6))

        assert (await engine.health()).alive
        await answer(engine, make_request(max_tokens=6))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_dead_engine_ends_its_requests_and_shows_in_the_health(stream: bool) -> None:
    dies = msgspec.structs.replace(PACED, faults=(Fault(kind="die", at=2, after_tokens=4),))
    async with (
        running(dies) as (engine, _),
        watching(engine, make_request(max_tokens=1000, ignore_eos=True)) as (other,),
    ):
        with pytest.raises(EngineDied):
            await answer(engine, make_request(max_tokens=1000, ignore_eos=True, stream=stream))
        await asyncio.wait([other.task])

        assert isinstance(other.error, EngineDied)
        health = await engine.health()
        assert (health.alive, health.state) == (False, "failed")


async def test_a_connection_lost_under_a_living_server_is_a_transport_error() -> None:
    async with running(PACED) as (engine, server):
        with pytest.raises(TransportError, match="max_receive_bytes"):
            async with running_engine(server, max_receive_bytes=200) as small:
                await answer(small, make_request(max_tokens=400, ignore_eos=True))

        assert (await engine.health()).alive


@asynccontextmanager
async def running_engine(server: MockVllmServer, **settings: Any) -> AsyncIterator[GrpcEngine]:
    engine = GrpcEngine(GrpcSettings(endpoint=f"127.0.0.1:{server.port}", vocab_size=1024, **settings))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def test_a_request_over_the_limit_is_refused_before_it_is_sent() -> None:
    async with running(settings={"max_request_bytes": 2000}) as (engine, server):
        with pytest.raises(PayloadTooLarge, match="its limit is 2000"):
            await answer(engine, make_request([900] * 1500))

        assert not server.calls


async def test_a_request_over_the_servers_own_limit_is_too_large_too() -> None:
    async with running(max_request_bytes=2000) as (engine, _):
        with pytest.raises(PayloadTooLarge):
            await answer(engine, make_request([900] * 1500))


async def test_running_requests_end_when_the_engine_closes() -> None:
    async with (
        running(PACED) as (engine, _),
        watching(engine, *[make_request(max_tokens=3000, ignore_eos=True, stream=s) for s in (True, False)]) as watches,
    ):
        await watches[0].until_tokens(3)
        await engine.close()
        await asyncio.wait([watch.task for watch in watches])

        assert [type(watch.error) for watch in watches] == [EngineDied, EngineDied]
        with pytest.raises(EngineDied):
            await answer(engine, make_request())


# -- the policy's life -----------------------------------------------------------------------------------------------


async def test_spans_through_a_pause_with_a_new_version() -> None:
    async with running(PACED) as (engine, _):
        asked: dict[str, Any] = {"max_tokens": 300, "ignore_eos": True}
        requests = [
            make_request(stream=True, **asked),
            make_request(options={"exact_spans": True}, **asked),
            make_request(**asked),
        ]
        async with watching(engine, *requests) as watches:
            await watches[0].until_tokens(10)
            await engine.pause("keep")
            async with watching(engine, make_request(max_tokens=4, ignore_eos=True)) as (late,):
                await asyncio.wait([late.task], timeout=0.05)
                await engine.set_policy_version("v8")
                seen = watches[0].tokens
                await engine.resume()
                found = [(await watch.answer()).choices[0].policy_versions for watch in (*watches, late)]

        assert 10 <= seen < 300
        assert found[0] == [("initial", 0), ("v8", seen)]
        assert found[1][0] == ("initial", 0)
        assert found[1][1][1] is not None
        assert found[2] == [("initial", 0), ("v8", None)]
        assert found[3] == [("v8", 0)]


async def test_what_was_computed_again_is_marked_or_warned_of() -> None:
    async with running(PACED) as (engine, _):
        asked: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True}
        async with watching(engine, make_request(stream=True, **asked), make_request(**asked)) as watches:
            await watches[0].until_tokens(10)
            report = await engine.pause("keep", clear_cache=True)
            await asyncio.wait([watches[0].task], timeout=0.05)
            seen = watches[0].tokens
            await engine.resume()
            counted, unary = [(await watch.answer()).served_by for watch in watches]

        assert (report.kept, report.cleared) == (2, True)
        assert counted.recomputed == [(0, 3 + seen - 1)]
        assert unary.recomputed == []
        assert "exact_spans" in unary.warnings[0]


async def test_a_pause_of_somebody_else_is_seen_at_the_start() -> None:
    async with running(PACED) as (engine, server):
        await engine.pause("keep")
        async with running_engine(server) as other:
            assert (await other.health()).state == "paused"
            assert (await other.resume()).was_paused


async def test_a_name_that_the_server_will_not_give_up_is_counted(tmp_path: Path) -> None:
    adapter = tmp_path / "a"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"r": 8, "seed": 1}')
    sticks = MockSettings(vocab_tokens=1024, faults=(Fault(kind="fail", operation="unload_adapter"),))
    async with running(sticks) as (engine, _):
        await engine.load_adapter("p@1", str(adapter))
        await engine.unload_adapter("p@1")

        assert (await engine.health()).counters == {"stuck_adapters": 1}
        assert await engine.loaded_adapters() == []
        await engine.unload_adapter("p@1")
        with pytest.raises(NotFound):
            await engine.load_adapter("p@2", str(tmp_path / "none"))


@pytest.mark.parametrize("stream", [False, True])
async def test_an_adapter_goes_after_the_requests_whose_reader_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    adapter = tmp_path / "a"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"r": 8, "seed": 1}')
    async with running(PACED) as (engine, server):
        order: list[str] = []
        abort, unload = server.engine.abort, server.engine.unload_adapter

        async def slow_abort(request_id: str) -> int:
            await asyncio.sleep(0.2)
            order.append("abort")
            return await abort(request_id)

        async def recorded_unload(name: str) -> None:
            order.append("unload")
            await unload(name)

        monkeypatch.setattr(server.engine, "abort", slow_abort)
        monkeypatch.setattr(server.engine, "unload_adapter", recorded_unload)
        await engine.load_adapter("p@1", str(adapter))
        request = make_request(
            max_tokens=1000, stream=stream, ignore_eos=True, fields={"adapter": "p@1"}, options={"exact_spans": True}
        )
        async with watching(engine, request) as (watch,):
            await until(lambda: bool(server.calls))
            await watch.leave()
        await engine.unload_adapter("p@1")
        assert order == ["abort", "unload"]

        order.clear()
        await engine.load_adapter("p@2", str(adapter))
        await answer(engine, make_request(max_tokens=3, stream=stream, fields={"adapter": "p@2"}))
        await engine.unload_adapter("p@2")
        assert order == ["unload"]


async def test_an_adapter_is_held_to_the_models_directory_where_it_can_be_read(tmp_path: Path) -> None:
    model = shared_model("qwen3")
    good = str(shared_model("lora", base=str(model), seed=1))
    async with running(settings={"model_path": str(model)}) as (engine, _):
        for path in bad_adapters(tmp_path, good):
            with pytest.raises((InvalidRequest, NotFound)):
                await engine.load_adapter("p@1", path)
            assert await engine.loaded_adapters() == []
        await engine.load_adapter("p@1", good)
        assert await engine.loaded_adapters() == ["p@1"]
    async with running() as (engine, _):  # a server whose model is elsewhere says itself what fits
        await engine.load_adapter("p@1", str(tmp_path / "width"))


async def test_a_stream_announces_its_prompt_once_for_all_choices() -> None:
    async with running() as (engine, _):
        events = await collect(engine, make_request(max_tokens=5, n=3, seed=1, stream=True, ignore_eos=True))

        assert isinstance(events[0], PromptEvent)
        assert sum(isinstance(event, PromptEvent) for event in events) == 1
        choices = [event for event in events if isinstance(event, ChoiceEvent)]
        assert sorted(event.index for event in choices) == [0] * 5 + [1] * 5 + [2] * 5


# -- a flush beside a pause -------------------------------------------------------------------------------------------


Race = Callable[[GrpcEngine, str], Awaitable[tuple[FlushReport, PauseReport]]]


@pytest.fixture
def pause_amid_a_flush(monkeypatch: pytest.MonkeyPatch) -> Race:
    """Flush with preemption, and pause while it holds the server paused: after its `pause` or before its `resume`."""

    async def race(engine: GrpcEngine, name: str) -> tuple[FlushReport, PauseReport]:
        begun, go_on = asyncio.Event(), asyncio.Event()
        call = getattr(engine.control, name)

        async def slowly(*args: Any, **options: Any) -> None:
            if name == "pause":
                await call(*args, **options)
            begun.set()
            await go_on.wait()
            if name == "resume":
                await call(*args, **options)

        monkeypatch.setattr(engine.control, name, slowly)
        flushing = asyncio.create_task(engine.flush_cache(preempt=True))
        await asyncio.wait_for(begun.wait(), 5.0)
        pausing = asyncio.create_task(engine.pause("keep"))
        await asyncio.sleep(0)
        go_on.set()
        return await asyncio.wait_for(asyncio.gather(flushing, pausing), 5.0)

    return race


@pytest.mark.parametrize("call", ["pause", "resume"])
async def test_a_flush_resumes_nothing_that_a_caller_pauses_meanwhile(call: str, pause_amid_a_flush: Race) -> None:
    """The server has one pause only: a flush that ends would lift the caller's."""
    async with running(PACED) as (engine, _):
        flushed, paused = await pause_amid_a_flush(engine, call)
        assert flushed.reset
        assert not paused.already_paused
        assert await engine.control.is_paused()
        assert (await engine.health()).state == "paused"
        assert (await engine.resume()).was_paused
        assert not await engine.control.is_paused()


async def test_a_flush_beside_a_pause_that_still_drains_refuses() -> None:
    request = make_request(max_tokens=400, ignore_eos=True, stream=True)
    async with running(PACED) as (engine, _), watching(engine, request) as (watch,):
        await watch.until_tokens(1)
        draining = asyncio.create_task(engine.pause("wait"))
        await asyncio.sleep(0)
        report = await engine.flush_cache(preempt=True)
        assert (report.reset, report.reason) == (False, "a pause is on its way; flush once it is there")
        assert (await asyncio.wait_for(draining, 10.0)).drained == 1
        assert (await engine.flush_cache(preempt=True)).reset
        assert await engine.control.is_paused()
