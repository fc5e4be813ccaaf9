"""Our real engines behind Dynamo's frontend: the embedded one in CI, and in the full run two of it beside vLLM in process."""

import contextlib
import itertools
import os
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tests.models.tiny import shared_model
from tests.real import dynamo_deployment as deployment
from tests.real import processes
from tests.real.test_dynamo_full import etcd

from rollplane import AdminClient, Client, DynamoClient
from rollplane.client.options import GenerateOptions
from rollplane.errors import InvalidRequest
from rollplane.protocol.response import GenerateResponse

pytestmark = pytest.mark.timeout(300)

PROMPT = [300 + 7 * i for i in range(12)]

REQUESTS: dict[str, GenerateOptions] = {
    "logprobs": {"sampling_params": {"max_tokens": 8, "temperature": 0, "logprobs": 2}},
    "prompt": {"sampling_params": {"max_tokens": 4, "temperature": 0, "prompt_logprobs": 1}},
    "sampled": {"sampling_params": {"max_tokens": 8, "top_k": 5, "top_p": 0.9, "seed": 3, "n": 2, "logprobs": 1}},
    "stop": {"sampling_params": {"max_tokens": 400, "seed": 3, "stop": ["e", "zz"], "logprobs": 0}},
    "salt": {"sampling_params": {"max_tokens": 4, "temperature": 0, "logprobs": 0}, "cache_salt": "v7", "priority": 3},
}
by_request = pytest.mark.parametrize("name", list(REQUESTS))


@dataclass(frozen=True)
class Alone:
    theirs: processes.Server
    worker: processes.Server
    model: Path
    adapter: Path


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alone]:
    """One embedded engine with experts."""
    root = tmp_path_factory.mktemp("dynamo-embedded")
    model = shared_model("qwen3-moe")
    adapter = shared_model("lora", base=str(model), seed=1)
    with (
        deployment.frontend(root / "kv", root / "frontend.log", mode="round-robin") as theirs,
        deployment.embedded_worker(root / "kv", root / "e.log", model=model) as worker,
    ):
        deployment.until(lambda: "roll" in deployment.models(theirs), theirs.log)
        yield Alone(theirs, worker, model, adapter)


@by_request
async def test_an_embedded_engine_answers_through_dynamo_as_it_does_without(alone: Alone, name: str) -> None:
    options: GenerateOptions = {**REQUESTS[name], "request_id": name, "model": "roll"}
    async with DynamoClient(alone.theirs.http_url) as theirs, Client(alone.worker.http_url) as ours:
        through, direct = await theirs.generate(PROMPT, **options), await ours.generate(PROMPT, **options)

    assert deployment.comparable(through) == deployment.comparable(direct)
    assert through.choices[0].routed_experts is not None
    assert (through.choices[0].sampling_mask is not None) == (name != "stop")
    if name == "stop":
        assert (through.choices[0].finish_reason, through.choices[0].stop_reason) == ("stop", "e")


async def test_an_embedded_engines_adapters_and_updates_show_through_dynamo(alone: Alone) -> None:
    greedy: GenerateOptions = {"sampling_params": {"max_tokens": 6, "temperature": 0, "logprobs": 0}, "request_id": "g"}
    async with (
        DynamoClient(alone.theirs.http_url) as theirs,
        Client(alone.worker.http_url) as ours,
        AdminClient(alone.worker.http_url) as admin,
    ):
        base = await theirs.generate(PROMPT, model="roll", **greedy)
        record = await admin.load_adapter("ad1", str(alone.adapter))
        deployment.until(lambda: "ad1" in deployment.models(alone.theirs), alone.theirs.log)
        adapted = await theirs.generate(PROMPT, model="ad1", **greedy)
        assert deployment.comparable(adapted) == deployment.comparable(
            await ours.generate(PROMPT, model="ad1", **greedy)
        )
        assert adapted.served_by.adapter_generation == record.generation
        assert logprobs(adapted) != logprobs(base)
        await admin.unload_adapter("ad1")

        await admin.update_policy(str(alone.model), version="v1")
        updated = await theirs.generate(PROMPT, model="roll", **greedy)
        assert updated.choices[0].policy_versions == [("v1", 0)]
        with pytest.raises(InvalidRequest, match="v99"):
            await theirs.generate(PROMPT, model="roll", policy_version="v99", **greedy)


def logprobs(response: GenerateResponse) -> list[float]:
    found = response.choices[0].logprobs
    assert found is not None
    return [float(value) for value in found.values]


@dataclass(frozen=True)
class Three:
    """Two embedded engines `a` and `b`, and vLLM in process `v`, of one checkpoint, behind Dynamo's frontend and ours."""

    theirs: processes.Server
    ours: processes.Server
    workers: dict[str, processes.Server]
    adapter: Path


@pytest.fixture(scope="module", params=["file", "etcd"])
def three(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Three]:
    root = tmp_path_factory.mktemp(f"dynamo-three-{request.param}")
    kv, model = root / "kv", shared_model("qwen3")
    adapter = shared_model("lora", base=str(model), seed=1)
    with contextlib.ExitStack() as stack:
        shared = stack.enter_context(etcd(root)) if request.param == "etcd" else {}
        theirs = stack.enter_context(deployment.frontend(kv, root / "frontend.log", environment=shared))
        lora = ["--enable-lora", "--max-loras", "2", "--max-cpu-loras", "4"]
        workers = {
            "v": stack.enter_context(
                deployment.vllm_worker(kv, root / "v.log", model=model, arguments=lora, environment=shared)
            )
        }
        for name in ("a", "b"):
            workers[name] = stack.enter_context(
                deployment.embedded_worker(kv, root / f"{name}.log", model=model, environment=shared)
            )
        ours = stack.enter_context(
            deployment.own_frontend(root / "own.log", arguments=["--dynamo-rl-url", theirs.rl_url])
        )
        deployment.until(lambda: deployment.standing(ours) == [None] * 3, root / "own.log")
        deployment.until(lambda: "roll" in deployment.models(theirs), theirs.log)
        yield Three(theirs, ours, workers, adapter)


async def by_worker(
    client: Client | DynamoClient, workers: set[str], options: GenerateOptions, *, fresh: Callable[[], str]
) -> dict[str, GenerateResponse]:
    """The answer of each worker to one request; it is asked, each time under another salt, until all have answered."""
    found: dict[str, GenerateResponse] = {}
    for _ in range(200):
        answer = await client.generate(PROMPT, **{**options, "cache_salt": fresh()})
        found.setdefault(answer.served_by.worker, answer)
        if set(found) == workers:
            return found
    raise AssertionError(f"200 requests were answered by {sorted(found)} only")


_numbers = itertools.count()


def fresh_salt() -> str:
    return f"salt-{next(_numbers)}"


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", [name for name in REQUESTS if name != "prompt"])  # not with adapters on a CPU's vLLM
async def test_three_real_engines_answer_alike_behind_both_frontends(three: Three, name: str) -> None:
    options: GenerateOptions = {**REQUESTS[name], "request_id": name, "model": "roll"}
    async with DynamoClient(three.theirs.http_url) as theirs, Client(three.ours.http_url) as ours:
        through = await by_worker(theirs, set(three.workers), options, fresh=fresh_salt)
        direct = await by_worker(ours, set(three.workers), options, fresh=fresh_salt)

    for worker, answer in through.items():
        assert deployment.comparable(answer) == deployment.comparable(direct[worker]), worker
    if options["sampling_params"].get("temperature") == 0:  # type: ignore[union-attr]
        ids = {tuple(answer.choices[0].token_ids.tolist()) for answer in through.values()}
        assert len(ids) == 1
        if name == "logprobs":
            np.testing.assert_allclose(logprobs(through["v"]), logprobs(through["a"]), atol=2e-3)


@pytest.mark.full
@pytest.mark.timeout(400)
async def test_one_adapter_of_the_fleet_is_the_same_on_three_real_engines(three: Three) -> None:
    options: GenerateOptions = {"sampling_params": {"max_tokens": 6, "temperature": 0}, "request_id": "lora"}
    async with (
        DynamoClient(three.theirs.http_url) as theirs,
        Client(three.ours.http_url) as ours,
        AdminClient(three.ours.http_url) as admin,
    ):
        base = await theirs.generate(PROMPT, model="roll", **options)
        await admin.load_adapter("ad1", str(three.adapter))
        deployment.until(lambda: "ad1" in deployment.models(three.theirs), three.theirs.log)
        through = await by_worker(theirs, set(three.workers), {**options, "model": "ad1"}, fresh=fresh_salt)
        direct = await by_worker(ours, set(three.workers), {**options, "model": "ad1"}, fresh=fresh_salt)
        for worker, answer in through.items():
            assert deployment.comparable(answer) == deployment.comparable(direct[worker]), worker
        ids = {tuple(answer.choices[0].token_ids.tolist()) for answer in through.values()}
        assert len(ids) == 1
        assert ids != {tuple(base.choices[0].token_ids.tolist())}
        await admin.unload_adapter("ad1")
    deployment.until(lambda: "ad1" not in deployment.models(three.theirs), three.theirs.log)


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("salt", [None, "v7"])
async def test_the_router_finds_the_vllm_that_is_warm_by_its_own_events(three: Three, salt: str | None) -> None:
    """One worker is warmed past Dynamo; a prompt that came before its event is cached elsewhere too: then others are tried."""
    options: GenerateOptions = {"sampling_params": {"max_tokens": 1}, "model": "roll", "cache_salt": salt}
    for attempt in range(20):
        prompt = random.Random(f"{salt} {attempt}").choices(range(7, 900), k=160)
        async with Client(three.workers["v"].http_url) as warm, DynamoClient(three.theirs.http_url) as theirs:
            await warm.generate(prompt, **options)
            found = [await theirs.generate([*prompt, 8, 9 + i], **options) for i in range(3)]
        if [each.served_by.worker for each in found] == ["v"] * 3:
            assert all((each.usage.cached_tokens or 0) >= 128 for each in found)
            return
    pytest.fail("the router never preferred the worker that was warm")


@pytest.mark.full
@pytest.mark.timeout(400)
async def test_after_a_kill_our_clients_calls_succeed(three: Three) -> None:
    """Dynamo moves no Generate: the client asks again by itself. Last in this file: the worker stays dead."""
    options: GenerateOptions = {"sampling_params": {"max_tokens": 4, "temperature": 0}, "model": "roll"}
    async with DynamoClient(three.theirs.http_url, attempts=8) as client:
        before = await client.generate(PROMPT, **options)
        os.kill(three.workers["b"].pid, signal.SIGKILL)
        served = []
        for _ in range(12):
            answer = await client.generate(PROMPT, **{**options, "cache_salt": fresh_salt()})
            served.append(answer.served_by.worker)
            assert answer.choices[0].token_ids.tolist() == before.choices[0].token_ids.tolist()
    assert "b" not in served
    listed = f"{three.theirs.rl_url}/v1/rl/workers"
    deployment.until(lambda: len(deployment.get(listed)["workers"]) == 2, three.theirs.log)


@pytest.mark.full
def test_workers_of_one_model_whose_cards_differ_are_not_both_served(alone: Alone, tmp_path: Path) -> None:
    """Dynamo keeps the first; that the block size is one of what must be alike is why it can be set."""
    store = alone.theirs.log.parent / "kv"
    arguments = ["--block-tokens", "64"]
    with deployment.embedded_worker(store, tmp_path / "other.log", model=alone.model, arguments=arguments):
        listed = f"{alone.theirs.rl_url}/v1/rl/workers"
        deployment.until(lambda: len(deployment.get(listed)["workers"]) == 2, alone.theirs.log)
        body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1}}
        seen = {deployment.passed(deployment.generate(alone.theirs, body)[1])["worker"] for _ in range(6)}
        assert seen == {"e"}
        assert "Rejected incompatible workers" in alone.theirs.log.read_text(errors="replace")
