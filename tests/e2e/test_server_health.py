"""Probes, metrics, models and the description over a real socket."""

from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.e2e.server_support import Served, serving, write_keys

from rollplane.engines.mock.engine import MockEngine
from rollplane.protocol.info import EngineHealth
from rollplane.server.app import route_table
from rollplane.testing import ScriptedEngine, scripted_info
from rollplane.worker import Worker


async def probes(served: Served) -> dict[str, int]:
    found = {}
    for path in ("/health", "/liveness", "/ready"):
        async with served.get(path) as answer:
            await answer.json()
            found[path[1:]] = answer.status
    return found


@pytest.mark.parametrize(
    ("health", "expected"),
    [
        (EngineHealth(alive=True, state="ready"), (200, 200, 200)),
        (EngineHealth(alive=True, state="ready", running=3, last_progress_s=1.0), (200, 200, 200)),
        (EngineHealth(alive=True, state="ready", running=3, last_progress_s=31.0), (503, 200, 503)),
        (EngineHealth(alive=True, state="ready", waiting=1, last_progress_s=31.0), (503, 200, 503)),
        (EngineHealth(alive=True, state="ready", last_progress_s=31.0), (200, 200, 200)),
        (EngineHealth(alive=True, state="paused", running=3, last_progress_s=900.0), (200, 200, 200)),
        (EngineHealth(alive=True, state="updating", waiting=3, last_progress_s=900.0), (200, 200, 200)),
        (EngineHealth(alive=True, state="asleep", waiting=3, last_progress_s=900.0), (200, 200, 503)),
        (EngineHealth(alive=True, state="starting"), (200, 200, 503)),
        (EngineHealth(alive=True, state="draining"), (200, 200, 503)),
        (EngineHealth(alive=True, state="failed"), (503, 200, 503)),
        (EngineHealth(alive=False, state="failed", reason="killed"), (503, 503, 503)),
    ],
    ids=repr,
)
async def test_probes_tell_stuck_from_paused_and_dead(health: EngineHealth, expected: tuple[int, int, int]) -> None:
    async with serving(ScriptedEngine(health=health), stall_s=30.0) as served:
        found = await probes(served)

    assert tuple(found.values()) == expected


async def test_an_engine_that_does_not_say_how_it_is_is_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    from rollplane.server import service

    class Mute(ScriptedEngine):
        async def health(self) -> EngineHealth:
            await asyncio.Event().wait()
            raise AssertionError

    monkeypatch.setattr(service, "HEALTH_TIMEOUT_S", 0.05)
    async with serving(Mute()) as served:
        assert (await probes(served))["health"] == 503


async def test_a_draining_server_is_not_ready_and_still_alive() -> None:
    async with serving(ScriptedEngine()) as served:
        served.service.lifecycle.draining = True
        async with served.get("/ready") as answer:
            assert (answer.status, (await answer.json())["state"]) == (503, "draining")
        assert (await probes(served))["liveness"] == 200


async def test_probes_say_no_secret(tmp_path: Path) -> None:
    keys = write_keys(tmp_path, data=["data-key"])
    async with serving(ScriptedEngine(), keys=keys) as served, served.get("/health") as answer:
        assert set(await answer.json()) == {"status", "state", "running", "waiting", "last_progress_s", "reason"}


async def test_metrics_parse_and_name_the_version_and_vllms_gauges() -> None:
    async with serving(Worker(MockEngine())) as served:
        await served.generate({"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4}})
        await served.chunks({"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4}})
        async with served.get("/metrics") as answer:
            families = {family.name: family for family in text_string_to_metric_families(await answer.text())}

    ok = {s.labels["stream"]: s.value for s in families["rollplane_requests"].samples if s.name.endswith("_total")}
    assert ok == {"true": 1, "false": 1}
    assert families["rollplane_prompt_tokens"].samples[0].value == 6
    assert families["rollplane_policy_version_info"].samples[0].labels == {"version": "initial"}
    assert families["vllm:num_requests_running"].samples[0].labels == {"engine": "0", "model_name": "mock"}
    for name in ("vllm:num_requests_waiting", "rollplane_engine_state_age_seconds", "rollplane_requests_held"):
        assert families[name].samples


async def test_a_version_change_leaves_one_version_in_the_metrics() -> None:
    async with serving(Worker(MockEngine())) as served:
        await served.metric("rollplane")
        async with served.post("/update_weight_version", {"new_version": "v2"}) as answer:
            assert answer.status == 200
        assert await served.metric('rollplane_policy_version_info{version="v2"}') == 1
        assert await served.metric("rollplane_policy_version_info{") == 1


async def test_the_openai_client_lists_models_and_reads_errors() -> None:
    info = scripted_info(aliases=["policy", "org/name"])
    async with serving(ScriptedEngine(info=info)) as served:
        client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="k", max_retries=0)
        assert [model.id for model in (await client.models.list()).data] == ["scripted", "policy", "org/name"]
        assert (await client.models.retrieve("policy")).id == "policy"
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.models.retrieve("other")
        root = client.with_options(base_url=served.url)
        with pytest.raises(openai.BadRequestError) as refused:
            await root.post("/inference/v1/generate", body={"token_ids": []}, cast_to=object)
        assert refused.value.param == "token_ids"
        assert refused.value.code == "invalid_request"
        await client.close()


async def test_the_description_names_every_public_route_and_resolves() -> None:
    async with serving(ScriptedEngine()) as served, served.get("/openapi.json") as answer:
        tree = await answer.json()

    shown = {(route.path.replace(":path}", "}"), m) for route in route_table("worker") for m in route.methods or ()}
    described = {(path, method.upper()) for path, methods in tree["paths"].items() for method in methods}
    assert described == {(p, m) for p, m in shown if m != "HEAD" and not p.startswith("/internal/")}
    for reference in _references(tree):
        assert reference.removeprefix("#/components/schemas/") in tree["components"]["schemas"]
    ids = [operation["operationId"] for methods in tree["paths"].values() for operation in methods.values()]
    assert len(ids) == len(set(ids))


def _references(tree: Any) -> list[str]:
    if isinstance(tree, dict):
        own = [tree["$ref"]] if isinstance(tree.get("$ref"), str) else []
        return own + [found for value in tree.values() for found in _references(value)]
    return [found for value in tree for found in _references(value)] if isinstance(tree, list) else []


async def test_the_docs_page_needs_nothing_from_elsewhere() -> None:
    async with serving(ScriptedEngine()) as served, served.get("/docs") as answer:
        page = await answer.text()

    assert "/inference/v1/generate" in page
    assert "http://" not in page
    assert "https://" not in page
    assert "<script" not in page
