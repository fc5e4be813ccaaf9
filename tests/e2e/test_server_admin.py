"""Administration over a real socket: one call under all its names, refusals that say why, nothing half done."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.e2e.server_support import Served, eventually, serving, write_keys

from rollplane.client.admin import AdminClient
from rollplane.engines.mock.directories import MOCK_WEIGHTS
from rollplane.engines.mock.engine import MockEngine
from rollplane.engines.mock.settings import MockSettings
from rollplane.errors import Conflict, NotFound
from rollplane.testing import ScriptedEngine
from rollplane.worker import Worker

KEY = {"Authorization": "Bearer admin-key"}
GROUP = {"master_address": "127.0.0.1", "master_port": 29_500, "world_size": 2, "backend": "gloo", "group_name": "g"}


def checkpoint(directory: Path, content: str) -> str:
    directory.mkdir(parents=True)
    (directory / MOCK_WEIGHTS).write_text(json.dumps({"content": content}))
    return str(directory)


def adapter(directory: Path, content: str) -> str:
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"]}')
    seed = int.from_bytes(content.encode(), "little") % 2**31
    low = np.random.default_rng(seed).normal(size=(4, 8)).astype(np.float32)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    save_file({name.format("A"): low, name.format("B"): low.T.copy()}, directory / "adapter_model.safetensors")
    return str(directory)


@pytest.fixture
async def worker() -> AsyncIterator[Served]:
    async with serving(Worker(MockEngine())) as served:
        yield served


async def call(served: Served, path: str, body: Any = None, *, method: str = "POST", **options: Any) -> tuple[int, Any]:
    """`body`: an object, or the bytes of one."""
    if isinstance(body, bytes):
        options = {"data": body, "headers": {"Content-Type": "application/json"}, **options}
        body = None
    async with served.session.request(method, served.url + path, json=body, **options) as answer:
        return answer.status, await answer.json()


async def test_our_client_drives_every_operation(worker: Served, tmp_path: Path) -> None:
    v1 = checkpoint(tmp_path / "v1", "one")
    a1 = adapter(tmp_path / "a1", "one")
    async with AdminClient(worker.url) as admin:
        assert (await admin.pause()).already_paused is False
        assert (await admin.pause()).already_paused is True
        assert (await admin.resume()).was_paused is True
        assert (await admin.resume()).was_paused is False
        staged = await admin.stage_weights(v1)
        report = await admin.update_policy(v1, expected_digest=staged.digest, operation_id="op")
        assert (report.policy_version, report.previous_version) == ("v1", "initial")
        assert await admin.operation("op") == {"0": "done"}
        assert await admin.policy_version() == "v1"
        await admin.set_policy_version("label")
        assert await admin.policy_version() == "label"
        assert (await admin.flush_cache()).reset is True
        loaded = await admin.load_adapter("a", a1)
        assert [record.generation for record in await admin.adapters()] == [loaded.generation]
        assert [card["id"] for card in (await call(worker, "/v1/models", method="GET"))[1]["data"]] == ["mock", "a"]
        await admin.unload_adapter("a")
        assert await admin.adapters() == []
        (record,) = await admin.workers()
        assert record.policy_version == "label"
        with pytest.raises(NotFound):
            await admin.operation("never")


async def prime_rl_transcript(served: Served, tmp_path: Path, *, world_size: int) -> None:
    """prime-rl's calls in their order, to a worker or to a frontend: start, the refused broadcast, three steps with an update that
    is asked for again and one whose files are late, adapters under one name, metrics.
    """
    for path in ("/health", "/liveness"):
        assert (await call(served, path, method="GET"))[0] == 200
    card = (await call(served, "/v1/models", method="GET"))[1]["data"][0]
    assert type(card["max_model_len"]) is int
    broadcaster = {
        "host": "h", "port": 29501, "rank_offset": 0, "inference_world_size": world_size, "timeout": 1200,
        "quantize_in_weight_transfer": False,
    }  # fmt: skip
    status, refused = await call(served, "/init_broadcaster", broadcaster)
    assert (status, "use the filesystem broadcast" in refused["error"]["message"]) == (400, True)
    for step in range(3):
        assert (await call(served, "/pause?mode=keep&clear_cache=false"))[0] == 200
        assert (await call(served, "/is_paused", method="GET"))[1]["is_paused"] is True
        late = await call(served, "/update_weights", {"weight_dir": str(tmp_path / f"step_{step}")})
        assert late[0] == 404  # and it resumes all the same
        assert (await call(served, "/resume"))[0] == 200
        weights = checkpoint(tmp_path / f"step_{step}", str(step))
        (Path(weights) / "STABLE").touch()
        (Path(weights) / "NCCL_READY").touch()
        assert (await call(served, "/pause?mode=keep&clear_cache=false"))[0] == 200
        for applied in (True, False):
            status, report = await call(served, "/update_weights", {"weight_dir": weights})
            assert (status, report["policy_version"], report["applied"]) == (200, f"step_{step}", applied)
        assert len(report["digest"]) == 64
        assert (await call(served, "/resume"))[0] == 200
        path = adapter(tmp_path / f"lora_{step}", str(step))
        status, record = await call(served, "/load_lora_adapter", {"lora_name": "policy", "lora_path": path})
        assert (status, record["lora_name"], record["generation"]) == (200, "policy", step + 1)
        cards = (await call(served, "/v1/models", method="GET"))[1]["data"]
        assert [each["id"] for each in cards] == [card["id"], "policy"]
        body = {"model": "policy", "token_ids": [5, 6], "cache_salt": str(step), "sampling_params": {"max_tokens": 2}}
        answer = await served.generate(body)
        assert answer["choices"][0]["policy_versions"] == [[f"step_{step}", 0]]
        assert answer["rollplane"]["adapter_generation"] == step + 1
        async with served.get("/metrics") as metrics:
            assert "vllm:num_requests_running" in await metrics.text()
    assert (await call(served, "/weight_info", method="GET"))[1] == {"weight_version": "step_2"}
    assert (await call(served, "/get_world_size", {}, method="GET"))[1] == {"world_size": world_size}
    assert (await call(served, "/v1/unload_lora_adapter", {"lora_name": "policy"}))[0] == 200
    cards = (await call(served, "/v1/models", method="GET"))[1]["data"]
    assert [each["id"] for each in cards] == [card["id"]]


async def test_the_calls_of_prime_rl_in_their_order(worker: Served, tmp_path: Path) -> None:
    await prime_rl_transcript(worker, tmp_path, world_size=1)


async def test_a_pause_says_what_it_did_and_is_seen_everywhere_as_one(tmp_path: Path) -> None:
    """Requests kept, aborted, drained and blocks freed; in readiness, metrics with its age and discovery; never as death."""
    body = {"token_ids": list(range(3, 40)), "sampling_params": {"max_tokens": 3000, "ignore_eos": True}}
    async with serving(Worker(MockEngine(MockSettings(step_s=0.001)))) as served:

        async def running(count: int) -> list[asyncio.Task[dict[str, Any]]]:
            asked = [asyncio.create_task(served.generate(body)) for _ in range(count)]

            async def run() -> bool:
                return (await served.service.health()).running == count

            await eventually(run)
            return asked

        kept = await running(2)
        report = (await call(served, "/engine/pause_generation", {"mode": "keep"}))[1]
        assert (report["kept"], report["aborted"], report["drained"], report["cleared"]) == (2, 0, 0, None)
        for path in ("/ready", "/health", "/liveness"):
            assert await call(served, path, method="GET") == (200, {
                "status": "ok", "state": "paused", "running": 2, "waiting": 0, "last_progress_s": 0.0, "reason": None,
            })  # fmt: skip
        assert await served.metric('rollplane_engine_state{state="paused"}') == 1
        assert await served.metric('rollplane_policy_state_age_seconds{state="paused"}') > 0
        (record,) = (await call(served, "/v1/rl/workers", method="GET"))[1]["workers"]
        assert record["state"] == "paused"
        report = (await call(served, "/pause"))[1]
        assert (report["already_paused"], report["aborted"], report["cleared"]) == (True, 2, True)
        assert {(await task)["choices"][0]["finish_reason"] for task in kept} == {"abort"}
        await call(served, "/resume")

        body["sampling_params"] = {"max_tokens": 200, "ignore_eos": True}
        drained = await running(1)
        report = (await call(served, "/engine/pause_generation", {"mode": "wait"}))[1]
        assert (report["kept"], report["drained"]) == (0, 1)
        assert (await drained[0])["choices"][0]["finish_reason"] == "length"
        flushed = (await call(served, "/engine/flush_cache", {}))[1]
        assert (flushed["reset"], flushed["blocks_freed"] > 0) == (True, True)
        await call(served, "/engine/resume_generation", {})
        assert (await call(served, "/ready", method="GET"))[1]["state"] == "ready"


async def test_an_update_that_is_asked_for_again_is_applied_once(worker: Served, tmp_path: Path) -> None:
    weights = checkpoint(tmp_path / "step_1", "one")
    reports = [await call(worker, "/update_weights", {"weight_dir": weights}) for _ in range(2)]

    assert [status for status, _ in reports] == [200, 200]
    assert [report["applied"] for _, report in reports] == [True, False]


async def test_files_that_are_not_there_yet_are_a_404(worker: Served, tmp_path: Path) -> None:
    """The statuses that prime-rl's client asks again after."""
    missing = str(tmp_path / "not-yet")
    for path, body in (
        ("/load_lora_adapter", {"lora_name": "a", "lora_path": missing}),
        ("/update_weights", {"weight_dir": missing}),
        ("/engine/load_lora", {"lora_name": "a", "source": {"uri": missing}}),
        ("/engine/update_weights_from_disk", {"model_path": missing}),
    ):
        status, answer = await call(worker, path, body)
        assert status == 404, path
        assert "does not exist (yet)" in answer["error"]["message"]


async def test_broadcasts_are_refused_with_the_reason(worker: Served, tmp_path: Path) -> None:
    marker = tmp_path / "step_1"
    marker.mkdir()
    (marker / "NCCL_READY").touch()
    (marker / "STABLE").touch()
    init = {"host": "h", "port": 29501, "rank_offset": 0, "inference_world_size": 1, "timeout": 1200}
    for path, body in (
        ("/init_broadcaster", init),
        ("/update_weights", {"weight_dir": str(marker)}),
        ("/update_weights", {"weight_dir": None}),
    ):
        status, answer = await call(worker, path, body)
        assert status == 400, path
        assert "pickled metadata" in answer["error"]["message"]


async def test_every_route_that_a_worker_publishes_is_there(worker: Served) -> None:
    """Discovery names routes; a trainer calls what it finds."""
    (record,) = (await call(worker, "/v1/rl/workers", method="GET"))[1]["workers"]
    described = (await call(worker, "/openapi.json", method="GET"))[1]["paths"]

    assert [name for name in record["routes"] if f"/engine/{name}" not in described] == []


async def test_an_engine_that_receives_no_broadcast_says_what_it_takes() -> None:
    group = {"master_address": "127.0.0.1", "master_port": 29501, "rank_offset": 1, "world_size": 2}
    tensors = [{"name": "w", "dtype": "float32", "shape": [2]}]
    async with serving(Worker(ScriptedEngine())) as served:
        for route, body in (
            ("init_weights_update_group", group),
            ("update_weights_from_distributed", {"tensors": tensors, "weight_version": "v1"}),
            ("stage_weights_from_distributed", {"tensors": tensors}),
            ("destroy_weights_update_group", {}),
        ):
            status, answer = await call(served, f"/engine/{route}", body)
            assert status == 400, route
            assert "receives no weights by broadcast" in answer["error"]["message"]


async def test_staged_weights_are_applied_by_their_digest(worker: Served, tmp_path: Path) -> None:
    weights = checkpoint(tmp_path / "v1", "one")
    digest = (await call(worker, "/engine/stage_weights", {"model_path": weights}))[1]["digest"]
    body = {"digest": digest, "weight_version": "seven"}
    status, report = await call(worker, "/engine/apply_staged_weights", body)

    assert (status, report["policy_version"], report["digest"]) == (200, "seven", digest)
    assert (await call(worker, "/engine/apply_staged_weights", {**body, "digest": "0" * 64}))[0] in (404, 409)


async def test_a_route_without_backing_is_a_404(worker: Served) -> None:
    for path in ("/collective_rpc", "/start_draft_weight_update", "/release_kv_cache_memory"):
        assert (await call(worker, path, {}))[0] == 404


async def test_an_engine_without_administration_says_so() -> None:
    async with serving(ScriptedEngine()) as served:
        for path in ("/engine/pause_generation", "/resume", "/engine/get_weight_version"):
            status, answer = await call(served, path, {})
            assert status == 404
            assert "without administration" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/engine/pause_generation", {"mode": "sometimes"}, "mode"),
        ("/engine/pause_generation", {"clear_cache": "no"}, "clear_cache"),
        ("/engine/pause_generation", {"moode": "keep"}, "moode"),
        ("/engine/update_weights_from_disk", {}, "model_path"),
        ("/engine/update_weights_from_disk", {"model_path": 3}, "model_path"),
        ("/engine/set_weight_version", {"weight_version": ""}, "weight_version"),
        ("/engine/set_weight_version", b'{"weight_version": 1e400}', "body.weight_version"),
        ("/engine/set_weight_version", b'{"weight_version":', "body cannot be decoded: Input data was truncated"),
        ("/engine/set_weight_version", b"[" * 3000, "body is nested too deeply"),
        ("/v1/rl/policy", {"bucket_bytes": 10**40}, "body.bucket_bytes"),
        ("/engine/init_weights_update_group", {**GROUP, "world_size": 10**40}, "body.world_size"),
        ("/engine/init_weights_update_group", {**GROUP, "rank_offset": 10**40}, "body.rank_offset"),
        ("/engine/load_lora", {"lora_name": "a", "source": {"uri": "/x", "key": 1}}, "key"),
        ("/engine/abort_request", {}, "request_id"),
        ("/pause?mode=never", None, "mode"),
        ("/pause?mod=keep", None, "mod"),
        ("/pause?mode=keep&mode=abort", None, "mode"),
        ("/pause?clear_cache=maybe", None, "clear_cache"),
    ],
)
async def test_a_bad_body_names_the_field_and_says_error_twice(worker: Served, path: str, body: Any, says: str) -> None:
    status, answer = await call(worker, path, body)

    assert status == 400
    assert says in answer["error"]["message"]
    if path.startswith("/engine/"):
        assert answer["status"] == "error"


async def test_bodies_that_run_code_elsewhere_are_only_refused_here(worker: Served, tmp_path: Path) -> None:
    """No decoder of ours runs code: pickles, in any dress, are bad requests and touch nothing."""
    touched = tmp_path / "touched"
    evil = f"cposix\nsystem\n(S'touch {touched}'\ntR.".encode()
    for path in ("/update_weights", "/engine/update_weights_from_disk", "/init_broadcaster", "/engine/load_lora"):
        for data, kind in (
            (evil, "application/json"),
            (evil, "application/octet-stream"),
            (json.dumps({"update_info": {"pickled": base64.b64encode(evil).decode()}}).encode(), "application/json"),
        ):
            headers = {"Content-Type": kind}
            async with worker.session.post(worker.url + path, data=data, headers=headers) as answer:
                assert 400 <= answer.status < 500
    assert not touched.exists()


async def test_a_reset_that_could_not_reset_is_a_409() -> None:
    """Running requests hold their blocks; with preempt they give them up."""
    engine = MockEngine(MockSettings(step_s=0.002))
    async with serving(Worker(engine)) as served:
        sampling = {"max_tokens": 4000, "ignore_eos": True}
        body = {"token_ids": list(range(64)), "sampling_params": sampling}
        asked = asyncio.create_task(served.generate(body))

        async def running() -> bool:
            return (await engine.health()).running == 1

        await eventually(running)
        for path in ("/engine/flush_cache", "/reset_prefix_cache"):
            status, answer = await call(served, path, {})
            assert status == 409
            assert answer["error"]["details"]["reset"] is False
        async with AdminClient(served.url) as admin:
            with pytest.raises(Conflict, match="not reset"):
                await admin.flush_cache()
            assert (await admin.flush_cache(preempt=True)).reset is True
        async with served.session.post(served.url + "/reset_prefix_cache?reset_running_requests=true") as answer:
            assert (answer.status, (await answer.json())["success"]) == (200, True)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)


async def test_paths_stay_inside_the_roots(tmp_path: Path) -> None:
    inside = tmp_path / "roots"
    good = checkpoint(inside / "v1", "one")
    outside = checkpoint(tmp_path / "elsewhere", "two")
    (inside / "link-out").symlink_to(outside)
    (inside / "link-in").symlink_to(good)
    holds_link = Path(checkpoint(inside / "v2", "three"))
    (holds_link / "model.safetensors").symlink_to(Path(outside) / MOCK_WEIGHTS)
    keys = write_keys(tmp_path, data=["data-key"], admin=["admin-key"])
    async with serving(Worker(MockEngine()), keys=keys, root=[str(inside)]) as served:
        for path, status in (
            (good, 200),
            (str(inside / "link-in"), 200),
            (f"file://{good}", 200),
            (str(inside / "not-yet"), 404),
            (outside, 403),
            (str(inside / "link-out"), 403),
            (str(holds_link), 403),
            (f"{inside}/../elsewhere", 403),
            ("../../etc", 403),
            ("/proc/self/root/x", 403),
            ("//host/x", 403),
            ("someorg/some-repo", 403),
            ("https://host/x", 403),
            ("hf://someorg/some-repo", 403),
            ("/etc\u0000", 400),
            ("", 400),
        ):
            for route, body in (
                ("/engine/update_weights_from_disk", {"model_path": path}),
                ("/update_weights", {"weight_dir": path}),
                ("/v1/rl/policy", {"model_path": path}),
                ("/engine/stage_weights", {"model_path": path}),
            ):
                found, answer = await call(served, route, body, headers=KEY)
                assert found == status, (route, path, answer)
            if status != 200:
                for route, body in (
                    ("/load_lora_adapter", {"lora_name": "a", "lora_path": path}),
                    ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": path}),
                    ("/engine/load_lora", {"lora_name": "a", "source": {"uri": path}}),
                ):
                    assert (await call(served, route, body, headers=KEY))[0] == status, (route, path)


async def test_with_keys_and_no_roots_no_path_is_allowed(tmp_path: Path) -> None:
    weights = checkpoint(tmp_path / "v1", "one")
    keys = write_keys(tmp_path, admin=["admin-key"])
    async with serving(Worker(MockEngine()), keys=keys) as served:
        status, answer = await call(served, "/update_weights", {"weight_dir": weights}, headers=KEY)

    assert status == 403
    assert "server.root" in answer["error"]["message"]


async def test_an_admin_call_is_audited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = write_keys(tmp_path, admin=["admin-key"])
    async with serving(Worker(MockEngine()), keys=keys) as served:
        await call(served, "/engine/pause_generation", {}, headers=KEY)
        await call(served, "/engine/set_weight_version", {"weight_version": ""}, headers=KEY)
        assert await served_metric(served, 'rollplane_admin_calls_total{call="pause_generation",result="ok"}') == 1

    lines = [line for line in capsys.readouterr().out.splitlines() if "admin_call" in line]
    assert "call=pause_generation" in lines[0]
    assert "route=/engine/pause_generation" in lines[0]
    assert "result=ok" in lines[0]
    assert "caller=admin:" in lines[0]
    assert "admin-key" not in "".join(lines)
    assert "result=invalid_request" in lines[1]


async def served_metric(served: Served, name: str) -> float:
    async with served.get("/metrics", headers=KEY) as answer:
        text = await answer.text()
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))
