"""An engine's own weight transfer and sleep over HTTP: vLLM's names and ours, one state table behind them."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.e2e.server_support import Served, eventually, serving, write_keys
from tests.e2e.test_server_admin import KEY, call, served_metric
from tests.e2e.test_server_frontend import fleet_of
from tests.models.tiny import shared_model

from rollplane.client.admin import AdminClient
from rollplane.engines.embedded.engine import EmbeddedEngine
from rollplane.engines.embedded.settings import EmbeddedSettings
from rollplane.engines.mock.engine import MockEngine
from rollplane.engines.mock.settings import Fault, MockSettings
from rollplane.errors import Conflict
from rollplane.worker import Worker

JOIN = {"master_address": "127.0.0.1", "master_port": 29_500, "rank_offset": 1, "world_size": 2, "packed": True}
PART = {"names": ["w"], "dtype_names": ["float32"], "shapes": [[2, 3]]}
OTHER = {**PART, "names": ["b"]}
PROMPT = list(range(3, 67))
CAPABLE = MockSettings(transfer_backend="nccl", sleep_mode=True, step_s=0.001)
TRANSFER_ROUTES = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")


def ask(**sampling: Any) -> dict[str, Any]:
    return {"token_ids": PROMPT, "sampling_params": {"temperature": 0, "max_tokens": 4, "ignore_eos": True, **sampling}}


def nested(name: str, levels: int) -> bytes:
    """A body with a field that nests so deep as no encoder of ours would write."""
    return b'{"%s":' % name.encode() + b'{"a":' * levels + b"1" + b"}" * (levels + 1)


@pytest.fixture
async def worker() -> AsyncIterator[Served]:
    async with serving(Worker(MockEngine(CAPABLE))) as served:
        yield served


async def done(served: Served, path: str, body: Any = None) -> Any:
    status, answer = await call(served, path, body)
    assert status == 200, (path, answer)
    return answer


async def state(served: Served) -> dict[str, int]:
    """The status of each probe."""
    found = {}
    for path in ("/ready", "/health", "/liveness"):
        async with served.get(path) as answer:
            found[path] = answer.status
    return found


async def test_the_calls_of_vllms_trainers_in_their_order(worker: Served) -> None:
    """TRL's and SkyRL's: no pause of their own, no version, every reply JSON."""
    before = await worker.generate(ask())
    assert (await worker.generate(ask()))["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    info = (await call(worker, "/server_info", method="GET"))[1]
    assert info["vllm_config"]["weight_transfer_config"] == {"backend": "nccl"}

    joined = await done(worker, "/init_weight_transfer_engine", {"init_info": JOIN})
    started = await done(worker, "/start_weight_update", {"is_checkpoint_format": True})
    first = await done(worker, "/update_weights", {"update_info": PART})
    second = await done(worker, "/update_weights", {"update_info": OTHER})
    assert (await call(worker, "/weight_info", method="GET"))[1] == {"weight_version": "initial"}
    finished = await done(worker, "/finish_weight_update", {})

    assert [each["message"] for each in (joined, started, finished)] == [
        "Weight transfer initialized",
        "Weight update started",
        "Weight update finished",
    ]
    assert (started["open"], first["parts"], second["parts"], finished["open"]) == (True, 1, 2, False)
    assert (finished["previous_version"], finished["policy_version"]) == ("initial", "update-1")
    assert finished["pause_s"] > 0
    after = await worker.generate(ask())
    assert after["choices"][0]["policy_versions"] == [["update-1", 0]]
    assert after["choices"][0]["token_ids"] != before["choices"][0]["token_ids"]
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_requests_wait_from_the_start_to_the_finish_and_nothing_resumes_between(worker: Served) -> None:
    await done(worker, "/engine/init_weight_transfer_engine", {"init_info": JOIN})
    await done(worker, "/engine/start_weight_update", {})
    waiting = asyncio.create_task(worker.generate(ask()))
    for path, body in (
        ("/resume", None),
        ("/engine/start_weight_update", {}),
        ("/engine/init_weight_transfer_engine", {"init_info": JOIN}),
        ("/engine/set_weight_version", {"weight_version": "v9"}),
        ("/sleep", None),
    ):
        status, answer = await call(worker, path, body)
        assert status == 409, (path, answer)
        assert "open" in answer["error"]["message"]
    assert await state(worker) == {"/ready": 200, "/health": 200, "/liveness": 200}
    assert await worker.metric('rollplane_policy_state_age_seconds{state="receiving"}') > 0
    (record,) = (await call(worker, "/v1/rl/workers", method="GET"))[1]["workers"]
    assert (record["state"], record["policy_version"]) == ("updating", "initial")
    await done(worker, "/engine/update_weights", {"update_info": PART})
    assert not waiting.done()
    await done(worker, "/engine/finish_weight_update", {"weight_version": "v1"})

    assert (await waiting)["choices"][0]["policy_versions"] == [["v1", 0]]


async def test_a_worker_that_the_caller_paused_stays_paused(worker: Served) -> None:
    await done(worker, "/pause?mode=keep&clear_cache=false")
    await done(worker, "/init_weight_transfer_engine", {"init_info": JOIN})
    await done(worker, "/start_weight_update")
    await done(worker, "/update_weights", {"update_info": PART})
    await done(worker, "/finish_weight_update", {"weight_version": "v1"})

    assert (await call(worker, "/is_paused", method="GET"))[1]["is_paused"]
    await done(worker, "/resume")
    assert (await worker.generate(ask()))["choices"][0]["policy_versions"] == [["v1", 0]]


async def test_every_step_may_be_asked_for_again(worker: Served) -> None:
    engine = worker.service.worker.engine if worker.service.worker is not None else None
    assert isinstance(engine, MockEngine)
    async with AdminClient(worker.url) as admin:
        await admin.init_weight_transfer(JOIN, operation_id="init")
        for _ in range(2):
            await admin.start_weight_update(operation_id="u1", step=0)
        for _ in range(2):
            assert (await admin.update_weights(PART, operation_id="u1", step=1)).parts == 1
        with pytest.raises(Conflict, match="other arguments"):
            await admin.update_weights(OTHER, operation_id="u1", step=1)
        assert (await admin.update_weights(OTHER, operation_id="u1", step=2)).parts == 2
        first = await admin.finish_weight_update("v1", operation_id="u1", step=3)
        assert await admin.finish_weight_update("v1", operation_id="u1", step=3) == first
        assert await admin.operation("u1") == dict.fromkeys("0123", "done")

    assert [engine.calls(name) for name in ("transfer_start", "transfer_update", "transfer_finish")] == [1, 2, 1]
    assert await admin_version(worker) == "v1"


async def admin_version(served: Served) -> str:
    version: str = (await call(served, "/weight_info", method="GET"))[1]["weight_version"]
    return version


@pytest.mark.parametrize("step", ["start", "update", "finish"])
async def test_a_step_that_fails_leaves_the_old_weights_serving_and_the_next_update_works(step: str) -> None:
    engine = MockEngine(CAPABLE)
    engine.add_fault(Fault(kind="fail", operation=f"transfer_{step}"))  # type: ignore[arg-type]
    async with serving(Worker(engine)) as worker:
        before = await worker.generate(ask())
        await done(worker, "/init_weight_transfer_engine", {"init_info": JOIN})
        statuses = []
        for path, body in (
            ("/start_weight_update", {}),
            ("/update_weights", {"update_info": PART}),
            ("/finish_weight_update", {"weight_version": "v1"}),
        ):
            statuses.append((await call(worker, path, body))[0])

        at = ["start", "update", "finish"].index(step)
        assert statuses == [200] * at + [502] + [409] * (2 - at)
        after = await worker.generate(ask())
        assert after["choices"] == before["choices"]
        assert await admin_version(worker) == "initial"

        await done(worker, "/start_weight_update")
        await done(worker, "/update_weights", {"update_info": PART})
        await done(worker, "/finish_weight_update", {"weight_version": "v2"})
        assert (await worker.generate(ask()))["choices"][0]["policy_versions"] == [["v2", 0]]


async def test_a_trainer_that_does_not_come_back_has_given_its_update_up(worker: Served) -> None:
    await done(worker, "/engine/init_weight_transfer_engine", {"init_info": JOIN})
    await done(worker, "/engine/start_weight_update", {"deadline_s": 0.05})

    held = await worker.generate(ask())

    assert held["choices"][0]["policy_versions"] == [["initial", 0]]
    status, answer = await call(worker, "/finish_weight_update", {"weight_version": "v1"})
    assert (status, "start one first" in answer["error"]["message"]) == (409, True)


async def test_a_disk_update_meanwhile_is_a_conflict_and_out_of_order_steps_reach_nobody(worker: Served) -> None:
    for path, body in (("/update_weights", {"update_info": PART}), ("/finish_weight_update", {})):
        status, answer = await call(worker, path, body)
        assert (status, "start one first" in answer["error"]["message"]) == (409, True)
    status, answer = await call(worker, "/start_weight_update", {})
    assert (status, "not joined" in answer["error"]["message"]) == (409, True)
    assert (await call(worker, "/is_paused", method="GET"))[1]["is_paused"] is False


async def test_an_engine_asleep_refuses_requests_and_is_not_dead(worker: Served) -> None:
    long = asyncio.create_task(worker.generate(ask(max_tokens=3000)))

    async def runs() -> bool:
        return (await worker.service.health()).running == 1

    await eventually(runs)
    slept = await done(worker, "/sleep?level=1&mode=abort")
    assert (slept["is_sleeping"], slept["was_sleeping"], slept["aborted"]) == (True, False, 1)
    assert (await done(worker, "/engine/sleep"))["was_sleeping"] is True
    ended = await long
    assert ended["choices"][0]["finish_reason"] == "abort"

    refused = await worker.generate(ask(), status=503)
    assert "asleep" in refused["error"]["message"]
    assert await state(worker) == {"/ready": 503, "/health": 200, "/liveness": 200}
    assert (await call(worker, "/is_sleeping", method="GET"))[1] == {"is_sleeping": True}
    assert (await call(worker, "/is_paused", method="GET"))[1]["state"] == "asleep"
    assert await worker.metric('rollplane_engine_state{state="asleep"}') == 1
    assert await worker.metric('rollplane_policy_state_age_seconds{state="asleep"}') > 0
    (record,) = (await call(worker, "/v1/rl/workers", method="GET"))[1]["workers"]
    assert record["state"] == "asleep"
    assert {"sleep", "wake_up", "is_sleeping", *TRANSFER_ROUTES} <= set(record["routes"])
    assert (record["capabilities"]["sleep"], record["capabilities"]["native_transfer"]) == (True, "nccl")
    assert (await call(worker, "/resume"))[0] == 409

    assert (await done(worker, "/wake_up?tags=weights"))["is_sleeping"] is True
    await worker.generate(ask(), status=503)
    assert await done(worker, "/wake_up?tags=kv_cache") == {
        "is_sleeping": False, "was_sleeping": True, "aborted": 0, "drained": 0,
    }  # fmt: skip
    assert (await done(worker, "/wake_up"))["was_sleeping"] is False
    answer = await worker.generate(ask())
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert await state(worker) == {"/ready": 200, "/health": 200, "/liveness": 200}


async def test_requests_that_are_held_when_the_engine_falls_asleep_are_refused(worker: Served) -> None:
    await done(worker, "/pause?mode=keep")
    held = asyncio.create_task(worker.generate(ask(), status=503))

    async def waits() -> bool:
        return worker.service.worker is not None and worker.service.worker.held_requests == 1

    await eventually(waits)
    await done(worker, "/engine/sleep", {"mode": "wait"})

    assert "asleep" in (await held)["error"]["message"]
    await done(worker, "/wake_up")
    assert (await call(worker, "/is_paused", method="GET"))[1]["is_paused"], "who was paused before sleeping stays so"


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/sleep?level=2", None, "after 2 the weights are gone"),
        ("/sleep?level=0", None, "0 is a pause"),
        ("/sleep?level=deep", None, "level must be a number"),
        ("/sleep?mode=keep", None, "no memory while asleep"),
        ("/engine/sleep", {"level": 2}, "after 2 the weights are gone"),
        ("/engine/sleep", {"level": "1"}, "level"),
        ("/wake_up?tags=cache", None, "'cache' is not one of weights, kv_cache"),
        ("/engine/wake_up", {"tags": []}, "tags"),
        ("/init_weight_transfer_engine", {}, "init_info"),
        ("/init_weight_transfer_engine", {"init_info": [1]}, "init_info"),
        ("/update_weights", {"update_info": "all"}, "update_info"),
        ("/update_weights", nested("update_info", 70), "update_info is nested more than 64 levels deep"),
        ("/update_weights", nested("update_info", 3000), "nested too deeply"),
        ("/engine/update_weights", nested("update_info", 70), "update_info is nested more than 64 levels deep"),
        ("/init_weight_transfer_engine", nested("init_info", 70), "init_info is nested more than 64 levels deep"),
        ("/init_weight_transfer_engine", nested("init_info", 3000), "nested too deeply"),
        ("/update_weights", {"update_info": PART, "weight_dir": "/w"}, "exclude"),
        ("/update_weights", {"update_info": PART, "weight_version": "v1"}, "exclude"),
        ("/finish_weight_update", {"weight_version": ""}, "weight_version"),
        ("/start_weight_update", {"is_checkpoint_format": False}, "is_checkpoint_format"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(worker: Served, path: str, body: Any, says: str) -> None:
    status, answer = await call(worker, path, body)

    assert (status, says in answer["error"]["message"]) == (400, True), answer
    assert await state(worker) == {"/ready": 200, "/health": 200, "/liveness": 200}


STEPS: list[tuple[str, Any]] = [
    ("/init_weight_transfer_engine", {"init_info": JOIN}),
    ("/start_weight_update", {}),
    ("/update_weights", {"update_info": PART}),
    ("/finish_weight_update", {}),
    ("/sleep", None),
    ("/wake_up", None),
]


@pytest.mark.parametrize("kind", ["mock", "embedded"])
async def test_an_engine_that_has_neither_refuses_them_by_name_and_serves(kind: str) -> None:
    model = EmbeddedSettings(model=str(shared_model("qwen3", layers=2)), threads=1, max_model_len=256)
    engine = MockEngine() if kind == "mock" else EmbeddedEngine(model)
    async with serving(Worker(engine)) as served:
        for name, body in STEPS:
            for path in (name, f"/engine{name}"):
                status, answer = await call(served, path, body)
                assert status == 400, (path, answer)
                assert f"the {kind} engine" in answer["error"]["message"]
        assert (await call(served, "/is_sleeping", method="GET"))[1] == {"is_sleeping": False}
        (record,) = (await call(served, "/v1/rl/workers", method="GET"))[1]["workers"]
        assert {"sleep", *TRANSFER_ROUTES}.isdisjoint(record["routes"])
        assert (await served.generate(ask()))["choices"][0]["finish_reason"] == "length"


async def test_a_frontend_says_that_they_are_its_workers_routes() -> None:
    async with fleet_of(MockEngine(CAPABLE)) as fleet:
        for name, body in STEPS:
            for path in (name, f"/engine{name}"):
                status, answer = await call(fleet.front, path, body)
                assert status == 404, (path, answer)
                assert "a worker's routes" in answer["error"]["message"]

        await done(fleet.workers[0], "/sleep")
        refused = await fleet.front.generate(ask(), status=503)
        assert "asleep" in refused["error"]["message"]


async def test_they_need_the_admin_key_and_are_audited(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    keys = write_keys(tmp_path, data=["data-key"], admin=["admin-key"])
    async with serving(Worker(MockEngine(CAPABLE)), keys=keys) as served:
        for name, body in STEPS:
            for path in (name, f"/engine{name}"):
                assert (await call(served, path, body))[0] == 401
                assert (await call(served, path, body, headers={"Authorization": "Bearer data-key"}))[0] == 403
        assert (await call(served, "/sleep", headers=KEY))[0] == 200
        assert (await call(served, "/engine/start_weight_update", {}, headers=KEY))[0] == 409
        assert await served_metric(served, 'rollplane_admin_calls_total{call="sleep",result="ok"}') == 1

    lines = [line for line in capsys.readouterr().out.splitlines() if "admin_call" in line]
    assert "call=sleep" in lines[0]
    assert "result=ok" in lines[0]
    assert "result=conflict" in lines[1]
