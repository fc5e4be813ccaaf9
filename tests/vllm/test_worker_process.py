"""`rollplane worker --engine vllm` as a process: started with vLLM's own arguments, served, updated, and bereaved."""

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.e2e.commands import ready_line, running
from tests.models.tiny import shared_model
from tests.vllm.support import ENGINE_ARGS, prompt

from rollplane.client.admin import AdminClient
from rollplane.client.client import Client
from rollplane.errors import Conflict, EngineDied, InvalidRequest

SAMPLING = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, "logprobs": 0}
END_S = 30


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("worker") / "log"


@pytest.fixture(scope="module")
def process(log: Path) -> Iterator[subprocess.Popen[str]]:
    """One worker for all tests here; the last of them ends it."""
    options = [
        "--dtype",
        "float32",
        "--max-model-len",
        "2048",
        "--served-model-name",
        "policy",
        "--policy-version",
        "initial",
    ]
    options += ["--root", str(shared_model("qwen3").parent), "--drain-s", "5"]
    words = ["worker", "--engine", "vllm", "--model", str(shared_model("qwen3")), "--port", "0", *options]
    with running(*words, "--", *ENGINE_ARGS, "--max-logprobs", "5", log=log) as started:
        yield started


@pytest.fixture(scope="module")
def url(process: subprocess.Popen[str], log: Path) -> str:
    found: str = ready_line(process, log)["url"]
    return found


async def test_a_stream_is_the_unary_answer(url: str) -> None:
    async with Client(url) as client:
        whole = (await client.generate(prompt(), sampling_params=SAMPLING)).choices[0]
        async with client.stream(prompt(), sampling_params=SAMPLING) as stream:
            deltas = [delta async for delta in stream]

    assert len(deltas) > 1
    streamed = stream.response.choices[0]
    assert streamed.token_ids.tolist() == whole.token_ids.tolist()
    assert whole.token_ids.size == SAMPLING["max_tokens"]
    assert streamed.logprobs is not None
    assert whole.logprobs is not None
    assert abs(streamed.logprobs.values - whole.logprobs.values).max() < 1e-5


async def test_vllms_own_arguments_reach_it(url: str) -> None:
    async with Client(url) as client:
        with pytest.raises(InvalidRequest, match="5"):
            await client.generate(prompt(), sampling_params={**SAMPLING, "logprobs": 6})


async def test_a_stop_string_ends_the_answer(url: str) -> None:
    sampling = {"max_tokens": 400, "temperature": 1.0, "seed": 3, "stop": ["e"]}
    async with Client(url) as client:
        choice = (await client.generate(prompt(), sampling_params=sampling)).choices[0]

    assert (choice.finish_reason, choice.stop_reason) == ("stop", "e")


async def test_one_id_for_two_prompts_is_a_conflict_and_swaps_nothing(url: str) -> None:
    """vLLM itself takes the same id twice and ends both with one abort."""
    async with Client(url, attempts=1) as client:
        alone = [(await client.generate(prompt(variant=v), sampling_params=SAMPLING)).choices[0] for v in (20, 21)]
        long = {**SAMPLING, "max_tokens": 1800}
        async with client.stream(prompt(variant=20), sampling_params=long, request_id="one") as stream:
            await anext(aiter(stream))
            with pytest.raises(Conflict):
                await client.generate(prompt(variant=21), sampling_params=SAMPLING, request_id="one")
        again = await client.generate(prompt(variant=21), sampling_params=SAMPLING, request_id="two")

    assert again.choices[0].token_ids.tolist() == alone[1].token_ids.tolist() != alone[0].token_ids.tolist()


async def test_callers_that_hang_up_leave_nothing_running(url: str) -> None:
    long = {**SAMPLING, "max_tokens": 1900}
    async with Client(url, attempts=1) as client, httpx.AsyncClient() as http:

        async def running_now() -> int:
            found: int = (await http.get(f"{url}/health")).json()["running"]
            return found

        async def kv_in_use() -> float:
            page = (await http.get(f"{url}/metrics")).text
            families = {family.name: family for family in text_string_to_metric_families(page)}
            [sample] = families["vllm:kv_cache_usage_perc"].samples
            return sample.value

        waiting = [
            asyncio.ensure_future(client.generate(prompt(variant=v), sampling_params=long, request_id=f"gone-{v}"))
            for v in range(30)
        ]
        while await running_now() == 0 or await kv_in_use() == 0:
            assert not any(task.done() for task in waiting)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        async with asyncio.timeout(20):
            while await running_now() or await kv_in_use():
                pass
        # An id whose caller is gone is free again.
        await client.generate(prompt(variant=3), sampling_params=SAMPLING, request_id="gone-3")


async def test_truncation_without_a_mask_is_warned_of(url: str) -> None:
    async with Client(url) as client:
        plain = await client.generate(prompt(), sampling_params={**SAMPLING, "temperature": 1.0})
        cut = await client.generate(prompt(), sampling_params={**SAMPLING, "temperature": 1.0, "top_p": 0.8})

    assert plain.served_by.warnings == []
    assert any("mask" in warning for warning in cut.served_by.warnings)


async def test_vllms_metrics_and_ours_are_one_page(url: str) -> None:
    """vLLM counts each token and step, though it is told of them some at a time."""
    async with httpx.AsyncClient() as http, Client(url) as client, AdminClient(url) as admin:

        async def read() -> dict[tuple[str, str | None], float]:
            page = list(text_string_to_metric_families((await http.get(f"{url}/metrics")).text))
            names = [family.name for family in page]
            assert len(names) == len(set(names))
            # A bucket's bound, a reason, or what else tells an outcome's series from its siblings.
            return {
                (s.name, s.labels.get("reason") or s.labels.get("finished_reason")): s.value
                for family in page
                for s in family.samples
                if s.name.startswith("vllm:")
            }

        before = await read()
        await client.generate(prompt(variant=77), sampling_params=SAMPLING)
        after = await read()
        await admin.pause("keep")
        held = asyncio.ensure_future(client.generate(prompt(variant=78), sampling_params=SAMPLING))
        while (waiting := await read())["vllm:num_requests_waiting", None] == 0:
            assert not held.done()
        await admin.resume()
        await held

    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    tokens = SAMPLING["max_tokens"]
    assert grown["vllm:generation_tokens_total", None] == tokens
    assert grown["vllm:prompt_tokens_total", None] == len(prompt())
    assert grown["vllm:iteration_tokens_total_count", None] == tokens
    assert grown["vllm:iteration_tokens_total_sum", None] == len(prompt()) + tokens
    assert grown["vllm:inter_token_latency_seconds_count", None] == tokens - 1
    assert grown["vllm:time_to_first_token_seconds_count", None] == 1
    assert grown["vllm:request_success_total", "length"] == 1
    assert after["vllm:num_requests_running", None] == 0
    assert waiting["vllm:num_requests_waiting_by_reason", "deferred"] == 1


async def test_an_update_from_disk_changes_the_answer_and_its_version(url: str) -> None:
    async with Client(url) as client, AdminClient(url) as admin:
        before = (await client.generate(prompt(), sampling_params=SAMPLING)).choices[0]
        running_on = asyncio.ensure_future(
            client.generate(prompt(variant=1), sampling_params={**SAMPLING, "max_tokens": 1500})
        )
        async with client.stream(prompt(variant=2), sampling_params=SAMPLING) as stream:
            await anext(aiter(stream))  # the engine runs, and the request before this one with it
            await admin.update_policy(str(shared_model("qwen3", seed=1)), version="next")
        after = (await client.generate(prompt(), sampling_params=SAMPLING)).choices[0]
        lived = (await running_on).choices[0]

    assert before.policy_versions == [("initial", 0)]
    assert after.policy_versions == [("next", 0)]
    assert after.token_ids.tolist() != before.token_ids.tolist()
    assert [version for version, _ in lived.policy_versions] == ["initial", "next"]
    boundary = lived.policy_versions[1][1]
    assert boundary is not None
    assert 0 < boundary < 1500


async def test_when_the_engine_core_dies_requests_say_so_and_the_process_ends(
    url: str, process: subprocess.Popen[str]
) -> None:
    """Last in this module: the worker is gone afterwards."""
    async with Client(url, attempts=1) as client:
        waiting = asyncio.ensure_future(client.generate(prompt(), sampling_params={**SAMPLING, "max_tokens": 1800}))
        async with client.stream(prompt(), sampling_params={**SAMPLING, "max_tokens": 1800}) as stream:
            deltas = aiter(stream)
            await anext(deltas)
            os.kill(engine_core_of(process.pid), signal.SIGKILL)
            with pytest.raises(EngineDied):
                async for _ in deltas:
                    pass
        with pytest.raises(EngineDied):
            await waiting

    assert await asyncio.to_thread(process.wait, END_S) > 0


def engine_core_of(pid: int) -> int:
    """The process id of vLLM's engine core, a child that names itself."""
    children = [int(c) for task in Path(f"/proc/{pid}/task").glob("*/children") for c in task.read_text().split()]
    names = {child: Path(f"/proc/{child}/cmdline").read_bytes().decode(errors="replace") for child in children}
    found = [child for child, name in names.items() if "EngineCore" in name]
    assert len(found) == 1, names
    return found[0]
