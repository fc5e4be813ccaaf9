"""The vLLM gRPC engine in front of vLLM's own Rust server and a real engine on the CPU: text and control."""

import asyncio
import json
import os
import re
import signal
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from tests.contract.grpc_over_mock import GRPC_LACKS
from tests.contract.native_cases import NO_NATIVE
from tests.e2e.server_support import serving
from tests.models.tiny import shared_model
from tests.real import processes

from rollplane.engines.grpc.engine import GrpcEngine
from rollplane.engines.grpc.settings import GrpcSettings
from rollplane.errors import (
    Conflict,
    DeadlineExceeded,
    EngineDied,
    InvalidRequest,
    PayloadTooLarge,
)
from rollplane.protocol.events import ChoiceEvent
from rollplane.protocol.response import GenerateResponse
from rollplane.server.text import text_directory
from rollplane.testing import CHECKS, Check, Subject, answer, make_request, run_check
from rollplane.worker import Worker

pytestmark = pytest.mark.timeout(300)

VOCABULARY = 1024
PROMPT = [300 + 17 * i for i in range(40)]

# A model that is large enough to need milliseconds for a step, so that a request lasts seconds whatever the machine: what
# a test does to a running request takes a few round trips. The work itself makes it last, so that a busy machine slows both.
MODEL = {"layers": 20, "hidden_size": 256, "intermediate_size": 768}
ENDLESS = 3000
"""Tokens of a request that a test ends before it ends by itself."""
LASTING = 400
"""Tokens of a request that is seen to run, is paused, and then runs to its end."""

LACKS = GRPC_LACKS | NO_NATIVE | {"masks_are_the_support", "routes_begin_where_asked", "adapters_load_serve_and_go"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[processes.Server]:
    log = tmp_path_factory.mktemp("vllm-rs") / "log"
    # A prompt in chunks and a seed together end the engine on a CPU: "CPU Generator does not use offset".
    arguments = [
        "--dtype",
        "float32",
        "--max-num-batched-tokens",
        "4096",
        "--structured-outputs-config",
        '{"enable_in_reasoning":true}',
    ]
    arguments += ["--kv-events-config", '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"inproc://none"}']
    environment = {"VLLM_SERVER_DEV_MODE": "1"}
    with processes.vllm_rs(shared_model("qwen3", **MODEL), log, arguments=arguments, environment=environment) as found:
        yield found


@pytest.fixture
async def engine(server: processes.Server) -> AsyncIterator[GrpcEngine]:
    engine = GrpcEngine(GrpcSettings(endpoint=server.grpc_target, logprobs_mode="raw", start_timeout_s=20))
    await engine.start()
    yield engine
    await engine.resume()
    await engine.close()


async def ask(engine: GrpcEngine, token_ids: list[int] = PROMPT, **asked: Any) -> GenerateResponse:
    return await answer(engine, make_request(token_ids, **asked))


def ids(response: GenerateResponse, index: int = 0) -> list[int]:
    return response.choices[index].token_ids.tolist()


def running_requests(server: processes.Server) -> float:
    with urllib.request.urlopen(f"{server.http_url}/metrics", timeout=10) as answered:
        text = answered.read().decode()
    return sum(float(each) for each in re.findall(r"^vllm:num_requests_running\{.*\} (\S+)$", text, re.MULTILINE))


# -- the contract ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_promise(check: Check, engine: GrpcEngine) -> None:
    why = await run_check(check, Subject(engine=engine, long_tokens=LASTING))

    assert (why is not None) == (check.__name__ in LACKS), why


# -- requests --------------------------------------------------------------------------------------------------------


async def test_the_server_is_described(engine: GrpcEngine) -> None:
    info = engine.info

    assert (info.max_model_len, info.vocab_bound, info.block_tokens, info.world_size) == (4096, VOCABULARY, 32, 1)
    assert info.eos_token_ids == [2]
    assert info.capabilities.lora is None
    assert info.capabilities.features == info.capabilities.raw_media == []
    assert info.capabilities.weight_transfer == []
    assert (info.capabilities.native_transfer, info.capabilities.sleep) == (None, False)


async def test_the_servers_http_side_gives_the_same_answer(engine: GrpcEngine, server: processes.Server) -> None:
    sampling = {"temperature": 0.8, "top_p": 0.9, "seed": 11, "max_tokens": 24, "logprobs": 2, "ignore_eos": True}
    body = json.dumps({"token_ids": PROMPT, "sampling_params": sampling}).encode()
    request = urllib.request.Request(
        f"{server.http_url}/inference/v1/generate", body, {"content-type": "application/json"}
    )
    answered = await asyncio.to_thread(lambda: urllib.request.urlopen(request, timeout=60).read())
    theirs = json.loads(answered)["choices"][0]
    ours = (await ask(engine, **sampling)).choices[0]

    assert ours.token_ids.tolist() == theirs["token_ids"]
    assert ours.logprobs is not None
    np.testing.assert_allclose(ours.logprobs.values, [e["logprob"] for e in theirs["logprobs"]["content"]], atol=1e-4)


async def test_an_omitted_temperature_is_not_greedy(engine: GrpcEngine) -> None:
    sampled = [ids(await ask(engine, max_tokens=12, seed=seed)) for seed in (1, 2)]

    assert sampled[0] != sampled[1]
    assert ids(await ask(engine, max_tokens=12, seed=1, temperature=1.0)) == sampled[0]


async def test_omitted_max_tokens_is_the_rest_of_the_context(engine: GrpcEngine) -> None:
    prompt = [300 + i % 700 for i in range(4000)]

    assert len(ids(await ask(engine, prompt, seed=1, ignore_eos=True))) == 96
    assert len(ids(await ask(engine, prompt, seed=1, ignore_eos=True, max_tokens=16))) == 16


async def test_stop_strings_end_a_choice(engine: GrpcEngine) -> None:
    found = (await ask(engine, seed=5, max_tokens=400, stop=["e", "a"], ignore_eos=True)).choices[0]

    assert found.finish_reason == "stop"
    assert found.stop_reason in ("e", "a")
    assert found.token_ids.size < 400


async def test_a_structure_bounds_the_text(engine: GrpcEngine) -> None:
    free = ids(await ask(engine, seed=5, max_tokens=6))
    bound = (await ask(engine, seed=5, max_tokens=6, structured_outputs={"choice": ["yes"]})).choices[0]

    assert bound.finish_reason == "stop"
    assert bound.token_ids.tolist() != free


async def test_chosen_ids_get_logprobs(engine: GrpcEngine) -> None:
    found = (await ask(engine, seed=5, max_tokens=2, logprobs=0, logprob_token_ids=[7, 9])).choices[0]

    assert found.logprobs is not None
    assert found.logprobs.alternatives is not None
    assert found.logprobs.alternatives.ids.reshape(2, -1).tolist() == [[7, 9], [7, 9]]


async def test_every_alternative_is_refused_where_the_server_has_a_limit(engine: GrpcEngine) -> None:
    with pytest.raises(InvalidRequest, match="limit is 20"):
        await ask(engine, logprobs=-1)


async def test_a_request_over_the_servers_limit_is_too_large(server: processes.Server) -> None:
    careless = GrpcEngine(GrpcSettings(endpoint=server.grpc_target, max_request_bytes=64 * 2**20))
    await careless.start()
    try:
        big = make_request(PROMPT, fields={"kv_transfer_params": {"filler": "x" * (33 * 2**20)}})
        with pytest.raises(PayloadTooLarge, match="33554432"):
            await answer(careless, big)
    finally:
        await careless.close()


async def test_a_deadline_ends_the_work_in_the_engine(engine: GrpcEngine, server: processes.Server) -> None:
    with pytest.raises(DeadlineExceeded):
        await ask(engine, max_tokens=ENDLESS, ignore_eos=True, options={"deadline_s": 0.4})

    await until_idle(server)


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_ends_the_work_in_the_engine(engine: GrpcEngine, server: processes.Server, stream: bool) -> None:
    task = asyncio.create_task(ask(engine, max_tokens=ENDLESS, ignore_eos=True, stream=stream, n=2))
    await until(lambda: running_requests(server) >= 2, "the requests to run")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    await until_idle(server)


async def test_a_unary_abort_keeps_the_tokens(engine: GrpcEngine, server: processes.Server) -> None:
    request = make_request(PROMPT, max_tokens=ENDLESS, ignore_eos=True, logprobs=0, n=2)
    task = asyncio.create_task(answer(engine, request))
    await until(lambda: running_requests(server) >= 2, "the requests to run")

    assert await engine.abort(request.request_id) == 1
    found = await task
    assert [choice.finish_reason for choice in found.choices] == ["abort", "abort"]
    assert all(0 < choice.token_ids.size < ENDLESS for choice in found.choices)


async def until(condition: Callable[[], bool], what: str) -> None:
    """The server tells of its requests only when it is asked."""
    try:
        async with asyncio.timeout(20):
            while not await asyncio.to_thread(condition):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"waited for {what}") from None


async def until_idle(server: processes.Server) -> None:
    await until(lambda: running_requests(server) == 0, "the engine to be idle")


# -- the policy's life -----------------------------------------------------------------------------------------------


@dataclass
class Relabelled:
    """Three answers to one seeded request that lived through a pause and a new label."""

    streamed: ChoiceEvent
    counted: GenerateResponse
    unary: GenerateResponse
    tokens: list[int]
    """Streamed ones; the first `at_pause` came before the new label."""
    at_pause: int


async def relabelled_midway(engine: GrpcEngine, **sampling: Any) -> Relabelled:
    seen: list[int] = []
    running = asyncio.Event()

    async def stream() -> ChoiceEvent:
        async for event in engine.generate(make_request(PROMPT, stream=True, **sampling)):
            if isinstance(event, ChoiceEvent):
                seen.extend(event.token_ids.tolist())
                last = event
                if len(seen) > 20:
                    running.set()
        return last

    streamed = asyncio.create_task(stream())
    counted = asyncio.create_task(ask(engine, options={"exact_spans": True}, **sampling))
    unary = asyncio.create_task(ask(engine, **sampling))
    async with asyncio.timeout(30):
        await running.wait()
    await engine.pause("keep")
    await engine.set_policy_version("v8")
    at_pause = len(seen)
    await engine.resume()
    return Relabelled(await streamed, await counted, await unary, seen, at_pause)


async def test_spans_are_exact_where_asked_and_unknown_where_not(engine: GrpcEngine) -> None:
    sampling: dict[str, Any] = {"max_tokens": LASTING, "ignore_eos": True, "seed": 3}
    whole = ids(await ask(engine, **sampling))
    await engine.set_policy_version("v7")
    found = await relabelled_midway(engine, **sampling)

    assert 20 < found.at_pause < LASTING
    assert found.streamed.policy_versions == [("v7", 0), ("v8", found.at_pause)]
    (first, boundary) = found.counted.choices[0].policy_versions
    assert first == ("v7", 0)
    assert boundary[0] == "v8"
    assert boundary[1] is not None
    assert 0 < boundary[1] < LASTING
    assert found.unary.choices[0].policy_versions == [("v7", 0), ("v8", None)]
    assert found.tokens[: found.at_pause] == whole[: found.at_pause]


async def test_a_label_outlives_the_sidecar(engine: GrpcEngine, server: processes.Server) -> None:
    await engine.set_policy_version("v-kept")
    other = GrpcEngine(GrpcSettings(endpoint=server.grpc_target))
    await other.start()

    assert other.policy_version == "v-kept"
    assert other.cache_life, "what its version's name cached before is not known"
    await other.close()


async def test_a_checkpoint_cannot_be_loaded_and_says_so(engine: GrpcEngine) -> None:
    with pytest.raises(InvalidRequest, match="transfer backend"):
        await engine.stage_weights(str(shared_model("qwen3")))


async def test_native_calls_that_the_server_lacks_are_refused(engine: GrpcEngine) -> None:
    with pytest.raises(InvalidRequest, match="without a weight transfer backend"):
        await engine.native.start()
    with pytest.raises(Conflict, match="sleep mode"):
        await engine.sleeping.sleep()
    assert (await engine.health()).state == "ready"


async def test_kv_event_sources_are_listed(engine: GrpcEngine) -> None:
    (source,) = await engine.kv_event_sources()

    assert (source.transport, source.encoding, source.data_parallel_rank) == ("zmq", "msgpack", 0)


async def test_the_world_size_comes_from_http_where_grpc_does_not_say_it(server: processes.Server) -> None:
    from rollplane.engines.grpc.proto import control_pb2
    from rollplane.engines.grpc.startup import find_world_size

    old = control_pb2.ParallelismInfo(tensor=1, pipeline=1)

    assert await find_world_size(old, GrpcSettings(http_endpoint=server.http_url)) == 1
    with pytest.raises(InvalidRequest, match=r"/none/get_world_size answered 404"):
        await find_world_size(old, GrpcSettings(http_endpoint=server.http_url + "/none/"))


async def test_evaluations_read_as_the_servers_own_http_side_answers_them(
    engine: GrpcEngine, server: processes.Server
) -> None:
    """The model that the server names is a directory here: its tokenizer and chat template are found there."""
    assert text_directory(None, engine.info.model) == shared_model("qwen3", **MODEL)
    tokens = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0.0}
    text = {**tokens, "prompt": "import os"}
    async with serving(Worker(engine), tokenizer=shared_model("qwen3", **MODEL)) as served:
        path = "/v1/completions"  # its chat route wants a token `<think>` of every Qwen3, which this tokenizer lacks
        for body in (tokens, text):
            theirs = await asyncio.to_thread(post, server.http_url + path, {**body, "model": engine.info.model})
            async with served.post(path, body) as answer:
                ours = await answer.json()
            assert answer.status == 200, ours
            assert ours["choices"][0]["text"] == theirs["choices"][0]["text"]
            assert ours["usage"]["prompt_tokens"] == theirs["usage"]["prompt_tokens"]


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            found: dict[str, Any] = json.loads(answer.read())
            return found
    except urllib.error.HTTPError as error:
        raise AssertionError((url, body, error.read())) from None


# -- death, last: the server does not come back ----------------------------------------------------------------------


async def test_a_dead_server_ends_requests_and_shows_in_the_health(
    engine: GrpcEngine, server: processes.Server
) -> None:
    task = asyncio.create_task(ask(engine, max_tokens=ENDLESS, ignore_eos=True))
    stream = engine.generate(make_request(PROMPT, max_tokens=ENDLESS, ignore_eos=True, stream=True))
    async for event in stream:  # its first token says that both run: they are stepped together
        if isinstance(event, ChoiceEvent):
            break
    os.kill(server.pid, signal.SIGKILL)

    with pytest.raises(EngineDied):
        await task
    with pytest.raises(EngineDied):
        async for _ in stream:
            pass
    health = await engine.health()
    assert (health.alive, health.state) == (False, "failed")
    with pytest.raises(EngineDied):
        await ask(engine, max_tokens=1)
    await engine.close()
    fresh = GrpcEngine(GrpcSettings(endpoint=server.grpc_target, start_timeout_s=0.5))
    with pytest.raises(EngineDied, match=r"not healthy within 0\.5 s"):
        await fresh.start()
