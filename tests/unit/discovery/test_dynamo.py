import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from tests.unit.rl.test_adapters import write_adapter

from rollplane.discovery.dynamo import DynamoDiscovery, read_listing
from rollplane.discovery.dynamo_routes import check_answer, route_of, version_in
from rollplane.discovery.dynamo_worker import UNDECLARED, RouteWorker
from rollplane.engines.mock.engine import MockEngine
from rollplane.errors import (
    Conflict,
    EngineFailed,
    InvalidRequest,
    NotFound,
    PreconditionFailed,
    RollplaneError,
    TransportError,
    Unavailable,
)
from rollplane.protocol.admin import StagedWeights, WorkerRecord
from rollplane.rl.base import Operation
from rollplane.testing import make_request
from rollplane.worker import Worker

SIDECAR = [
    "control/get_weight_version",
    "control/is_paused",
    "control/pause_generation",
    "control/resume_generation",
    "update/load_lora",
    "update/unload_lora",
    "update/update_weight_version",
]
VLLM = [
    "flush_cache",
    "get_weight_version",
    "pause_generation",
    "resume_generation",
    "set_weight_version",
    "update_weights_from_disk",
]


def entry(**changes: Any) -> dict[str, Any]:
    return {
        "namespace": "dynamo", "component": "backend", "endpoint": "rl", "instance_id": 7, "transport": {"tcp": "x"},
        "request_plane_url": "dyn://dynamo.backend.rl", "system_url": "http://10.0.0.5:9311", "model": "roll",
        "routes": SIDECAR, "world_size": 2, **changes,
    }  # fmt: skip


def listing(*entries: dict[str, Any], version: int = 1) -> bytes:
    return json.dumps({"protocol_version": version, "namespace": "dynamo", "workers": list(entries)}).encode()


def test_a_listing_is_records_by_their_system_url() -> None:
    (record,), left_out = read_listing(listing(entry(system_url="http://10.0.0.5:9311/")))

    assert (record.system_url, record.instance_id, record.world_size) == ("http://10.0.0.5:9311", "7", 2)
    assert left_out == []


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (entry(error="boom"), "dynamo.backend 7: boom"),
        (entry(system_url=None), "system_url[0] must be a string"),
        (entry(system_url="dyn://x"), "must be http(s)://host"),
    ],
)
def test_a_worker_that_cannot_be_driven_is_left_out_with_the_reason(bad: dict[str, Any], says: str) -> None:
    records, (reason,) = read_listing(listing(bad))

    assert records == []
    assert says in reason


def test_two_workers_at_one_address_are_one() -> None:
    records, left_out = read_listing(listing(entry(), entry(instance_id=8)))

    assert [record.instance_id for record in records] == ["7"]
    assert left_out == ["dynamo.backend 8: http://10.0.0.5:9311 is another worker's"]


@pytest.mark.parametrize("body", [b"", b"[]", b"\xff", b'{"workers": []}', listing(version=2)])
def test_what_is_no_listing_is_refused(body: bytes) -> None:
    with pytest.raises(TransportError, match="/v1/rl/workers"):
        read_listing(body)


def test_a_route_is_found_under_either_name_and_a_missing_one_is_named() -> None:
    assert route_of("pause", SIDECAR, worker="w") == "control/pause_generation"
    assert route_of("pause", VLLM, worker="w") == "pause_generation"
    with pytest.raises(
        InvalidRequest, match=r"worker w advertises no route update_weights_from_disk.*control/is_paused"
    ):
        route_of("update_from_disk", SIDECAR, worker="w")


@pytest.mark.parametrize(
    ("answer", "version"),
    [
        ({"weight_version": "v1"}, "v1"),
        ({"status": "ok", "version": "v2", "version_declared": True}, "v2"),
        ({"version": None}, None),
        ({}, None),
    ],
)
def test_a_version_is_read_under_either_name(answer: dict[str, Any], version: str | None) -> None:
    assert version_in(answer) == version


@pytest.mark.parametrize(
    ("status", "answer", "error"),
    [
        (200, {"status": "error", "message": "InvalidRequest: bad mode"}, InvalidRequest),
        (200, {"status": "error", "message": "LoRA adapter 'a' not found"}, NotFound),
        (200, {"success": False}, EngineFailed),
        (500, {"error": "Handler error", "message": "Python callback failed"}, EngineFailed),
        (404, {"error": "Route not found"}, NotFound),
        (403, None, InvalidRequest),
        (502, None, EngineFailed),
    ],
)
def test_a_refusal_is_read_from_the_answer_whatever_its_status(
    status: int, answer: Any, error: type[RollplaneError]
) -> None:
    with pytest.raises(error, match="worker w, route"):
        check_answer(status, answer, worker="w", route="route")


class FakeAnswer:
    def __init__(self, status: int, body: bytes) -> None:
        self.status, self._body = status, body

    async def read(self) -> bytes:
        return self._body


class FakeDynamo:
    """A worker's system server, as an HTTP session: what it was told, and what it has."""

    def __init__(self, *, version: str | None = None) -> None:
        self.version, self.paused, self.loras = version, False, dict[str, str]()
        self.log: list[tuple[str, dict[str, Any]]] = []
        self.down = False

    @contextlib.asynccontextmanager
    async def post(self, url: str, *, json: dict[str, Any], timeout: Any) -> AsyncIterator[FakeAnswer]:
        if self.down:
            raise aiohttp.ClientConnectionError("refused")
        route = url.split("/engine/", 1)[1]
        self.log.append((route, json))
        yield FakeAnswer(200, msgspec.json.encode(self._answer(route.rsplit("/", 1)[-1], json)))

    def _answer(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        if name == "pause_generation":
            self.paused = True
        elif name == "resume_generation":
            self.paused = False
        elif name == "is_paused":
            return {"is_paused": self.paused}
        elif name == "get_weight_version":
            return {"weight_version": self.version}
        elif name in ("set_weight_version", "update_weight_version"):
            self.version = body.get("weight_version", body.get("new_version"))
        elif name == "update_weights_from_disk":
            if not self.paused:
                return {"status": "error", "message": "Worker must be paused"}
            self.version = body["weight_version"]
        elif name == "load_lora":
            self.loras[body["lora_name"]] = body["source"]["uri"]
        elif name == "unload_lora" and self.loras.pop(body["lora_name"], None) is None:
            return {"status": "error", "message": f"LoRA adapter {body['lora_name']!r} not found"}
        return {"status": "ok"}


class FakePeer:
    """A worker of ours that knows digests."""

    state = None

    def __init__(self) -> None:
        self.asked = list[Operation]()

    async def stage_weights(self, path: str, *, operation: Operation, **_: object) -> StagedWeights:
        self.asked.append(operation)
        return StagedWeights(path=path, digest="d" * 64, tensors=3, bytes=12)


def record_of(routes: list[str]) -> WorkerRecord:
    (record,), _ = read_listing(listing(entry(routes=routes)))
    return record


def worker_of(server: FakeDynamo, routes: list[str], *, peer: FakePeer | None = None) -> RouteWorker:
    record = record_of(routes)
    return RouteWorker(record.system_url, record=lambda: record, peer=lambda: peer, session=server)  # type: ignore[arg-type]


async def test_a_workers_state_is_what_its_routes_say() -> None:
    worker = worker_of(FakeDynamo(version="v1"), SIDECAR)
    assert worker.state is None
    state = await worker.refresh()

    assert (state.policy_version, state.paused, state.policy_digest) == ("v1", False, None)
    assert (state.instance, state.info.model, state.info.world_size) == ("7", "roll", 2)
    assert repr(worker) == "<RouteWorker http://10.0.0.5:9311 at 'v1'>"


async def test_a_worker_without_a_version_says_so() -> None:
    assert (await worker_of(FakeDynamo(), SIDECAR).refresh()).policy_version == UNDECLARED


async def test_pauses_and_labels_go_by_the_names_that_it_has() -> None:
    server = FakeDynamo(version="v1")
    worker = worker_of(server, SIDECAR)
    await worker.refresh()
    assert not (await worker.pause("keep")).already_paused
    assert (await worker.refresh()).paused
    assert (await worker.resume()).was_paused
    await worker.set_policy_version("v2")

    said = [call for call in server.log if call[0] not in ("control/get_weight_version", "control/is_paused")]
    assert said == [
        ("control/pause_generation", {"mode": "keep", "clear_cache": False}),
        ("control/resume_generation", {}),
        ("update/update_weight_version", {"new_version": "v2"}),
    ]


async def test_an_update_pauses_for_itself_and_takes_its_digest_from_a_worker_of_ours() -> None:
    server = FakeDynamo(version="v1")
    worker = worker_of(server, VLLM, peer=FakePeer())
    await worker.refresh()
    report = await worker.update_from_disk("/ckpt/v2", version="v2", expected_digest="d" * 64)
    state = await worker.refresh()

    assert (report.previous_version, report.policy_version, report.digest) == ("v1", "v2", "d" * 64)
    assert (state.policy_version, state.policy_digest, state.paused) == ("v2", "d" * 64, False)


async def test_a_peer_is_asked_for_the_digest_by_a_name_that_its_own_update_does_not_use() -> None:
    peer = FakePeer()
    worker = worker_of(FakeDynamo(version="v1"), VLLM, peer=peer)
    await worker.update_from_disk("/ckpt/v2", version="v2", operation=Operation(id="op/apply", epoch=3, deadline_s=5.0))

    assert peer.asked == [Operation(id="op/apply/digest", epoch=3, deadline_s=5.0)]


async def test_an_update_to_other_contents_is_refused_before_anything_is_told() -> None:
    server = FakeDynamo(version="v1")
    worker = worker_of(server, VLLM, peer=FakePeer())
    with pytest.raises(Conflict, match="expected eeee"):
        await worker.update_from_disk("/ckpt/v2", version="v2", expected_digest="e" * 64)
    assert server.log == []


async def test_a_version_that_somebody_else_changed_has_no_digest() -> None:
    server = FakeDynamo(version="v1")
    worker = worker_of(server, VLLM, peer=FakePeer())
    await worker.update_from_disk("/ckpt/v2", version="v2")
    server.version = "v3"

    assert (await worker.refresh()).policy_digest is None


async def test_staging_names_the_missing_route() -> None:
    worker = worker_of(FakeDynamo(), SIDECAR, peer=FakePeer())
    with pytest.raises(InvalidRequest, match=r"http://10.0.0.5:9311 advertises no route update_weights_from_disk"):
        await worker.stage_weights("/ckpt/v2", operation=Operation())


async def test_without_a_worker_of_ours_the_digest_is_of_the_files(tmp_path: Path) -> None:
    worker = worker_of(FakeDynamo(), VLLM)
    (tmp_path / "model.safetensors").write_bytes(b"one")
    one = await worker.stage_weights(str(tmp_path), operation=Operation())
    (tmp_path / "model.safetensors").write_bytes(b"two")

    assert (await worker.stage_weights(str(tmp_path), operation=Operation())).digest != one.digest
    assert one.bytes == 3
    with pytest.raises(NotFound):
        await worker.stage_weights(str(tmp_path / "nowhere"), operation=Operation())


async def test_an_adapter_has_one_generation_at_a_time(tmp_path: Path) -> None:
    server = FakeDynamo(version="v1")
    worker = worker_of(server, SIDECAR)
    one, two = write_adapter(tmp_path / "1"), write_adapter(tmp_path / "2", fill=2.0)
    first = await worker.load_adapter("a", one)
    assert await worker.load_adapter("a", one) is first
    second = await worker.load_adapter("a", two)

    assert [route for route, _ in server.log] == ["update/load_lora", "update/unload_lora", "update/load_lora"]
    assert server.loras == {"a": f"file://{two}"}
    assert (first.generation, second.generation) == (1, 2)
    assert first.digest != second.digest
    assert (await worker.unload_adapter("a")).state == "gone"
    with pytest.raises(NotFound):
        await worker.unload_adapter("a")


async def test_files_that_are_no_adapter_are_refused_before_the_worker_is_told(tmp_path: Path) -> None:
    server = FakeDynamo()
    with pytest.raises(NotFound):
        await worker_of(server, SIDECAR).load_adapter("a", str(tmp_path))
    assert server.log == []


async def test_a_worker_that_cannot_be_asked_is_unreachable() -> None:
    server = FakeDynamo(version="v1")
    worker = worker_of(server, SIDECAR)
    await worker.refresh()
    server.down = True
    with pytest.raises(TransportError, match="cannot be asked for control/get_weight_version"):
        await worker.refresh()
    assert not worker.reachable


async def test_it_takes_no_requests_from_us_and_keeps_no_keys() -> None:
    worker = worker_of(FakeDynamo(version="v1"), SIDECAR)
    with pytest.raises(PreconditionFailed, match="through Dynamo's frontend only"):
        await anext(worker.engine.generate(make_request()))
    with pytest.raises(Unavailable, match="keeps no idempotency keys"):
        await worker.claim_key("k", "me", number=1, limit_s=1.0)
    assert worker.drop_requests("why") == await worker.engine.abort("x") == 0


async def test_its_facts_are_those_of_the_fleets_own_workers_but_for_the_model() -> None:
    ours = Worker(MockEngine())
    await ours.start()
    try:
        peer = FakePeer()
        peer.state = await ours.snapshot()  # type: ignore[assignment]
        worker = worker_of(FakeDynamo(version="v1"), SIDECAR, peer=peer)
        assert worker.info == msgspec.structs.replace(ours.info, model="roll", world_size=2)
    finally:
        await ours.close()


class FakeListing:
    """A frontend's RL port, as an HTTP session."""

    closed = False

    def __init__(self, *answers: tuple[int, bytes]) -> None:
        self._answers = list(answers)

    @contextlib.asynccontextmanager
    async def get(self, url: str, *, timeout: Any) -> AsyncIterator[FakeAnswer]:
        if not self._answers:
            await asyncio.Event().wait()
        status, body = self._answers.pop(0)
        yield FakeAnswer(status, body)

    async def close(self) -> None:
        self.closed = True


async def test_the_list_is_said_at_every_change_and_kept_where_it_cannot_be_read() -> None:
    other = entry(system_url="http://10.0.0.6:9311", instance_id=8)
    discovery = DynamoDiscovery("http://f:9302/", poll_s=0.0)
    session = FakeListing(
        (200, listing(entry())), (500, b""), (200, b"x"), (200, listing(entry())), (200, listing(other, entry()))
    )
    discovery._session = session  # type: ignore[assignment]
    watching = discovery.watch()

    assert await anext(watching) == ["http://10.0.0.5:9311"]
    assert await anext(watching) == ["http://10.0.0.5:9311", "http://10.0.0.6:9311"]
    assert repr(discovery) == "<DynamoDiscovery http://f:9302: 2 workers>"
    await watching.aclose()
    assert session.closed


async def test_a_worker_is_ours_by_a_route_that_only_ours_have() -> None:
    mine = entry(system_url="http://10.0.0.6:9311", routes=["get_world_size", "pause_generation"])
    discovery = DynamoDiscovery("http://f:9302", poll_s=0.0)
    discovery._session = FakeListing((200, listing(entry(), mine)))  # type: ignore[assignment]
    watching = discovery.watch()
    theirs_url, ours_url = await anext(watching)
    made: list[str] = []

    def ours(url: str) -> RouteWorker:
        made.append(url)
        return worker_of(FakeDynamo(), SIDECAR)

    discovery.make_worker(ours_url, ours=ours)
    assert isinstance(discovery.make_worker(theirs_url, ours=ours), RouteWorker)
    assert made == [ours_url]
    await watching.aclose()


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"frontend\.dynamo_rl_url"):
        DynamoDiscovery("f:9302")
