"""The Generate route over a real socket, unary: what clients rely on."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np
import pybase64
import pytest
from tests.e2e.server_support import GENERATE, Served, eventually, serving, strict_json

from rollplane.engines.mock.engine import MockEngine
from rollplane.engines.mock.settings import Fault, MockSettings
from rollplane.errors import EngineFailed
from rollplane.protocol.answer import decode_msgpack
from rollplane.protocol.artifacts import Alternatives, TokenLogprobs
from rollplane.protocol.events import ChoiceEvent, EndEvent
from rollplane.protocol.info import Capabilities, MoeShape
from rollplane.testing import ScriptedEngine, script_choice, script_of, scripted_info
from rollplane.worker import Worker

PROMPT = [5, 6, 7]


@pytest.fixture
async def mock() -> AsyncIterator[Served]:
    settings = MockSettings(max_model_len=64, moe=MoeShape(layers=2, top_k=2, num_experts=8))
    async with serving(Worker(MockEngine(settings)), max_body_bytes=10_000) as served:
        yield served


def ask(**sampling: Any) -> dict[str, Any]:
    return {"token_ids": PROMPT, "sampling_params": sampling}


async def test_omitted_max_tokens_runs_to_the_end_of_the_context(mock: Served) -> None:
    answer = await mock.generate(ask(ignore_eos=True))

    assert len(answer["choices"][0]["token_ids"]) == 64 - len(PROMPT)
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_an_explicit_max_tokens_of_16_stays_16(mock: Served) -> None:
    answer = await mock.generate(ask(ignore_eos=True, max_tokens=16))

    assert len(answer["choices"][0]["token_ids"]) == 16


async def test_the_defaults_of_prime_rl_are_served(mock: Served) -> None:
    sampling = {"temperature": 1.0, "top_k": -1, "min_p": 0.0, "return_token_ids": True, "logprobs": 1}
    sampling |= {"stop_token_ids": [2], "skip_special_tokens": False, "max_tokens": 4, "cache_salt": "7"}
    async with mock.post(GENERATE, ask(**sampling), headers={"X-Session-ID": "s"}) as answer:
        content = await answer.read()

    tree = strict_json(content)
    choice = tree["choices"][0]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [f"token_id:{t}" for t in choice["token_ids"]]
    assert b'"routed_experts":{"data":"' in content  # the bytes that the renderers client looks for


async def test_a_json_answer_has_every_key(mock: Served) -> None:
    answer = await mock.generate(ask(max_tokens=1))

    assert set(answer) == {
        *("request_id", "model", "created", "choices", "usage", "prompt_logprobs", "prompt_token_id_logprobs"),
        *("prompt_token_ids", "mm_placeholders", "metrics", "kv_transfer_params", "ec_transfer_params", "rollplane"),
    }


async def test_msgpack_holds_the_same_answer_as_json(mock: Served) -> None:
    body = ask(max_tokens=5, logprobs=1, seed=3)
    as_json = await mock.generate(body)
    async with mock.post(GENERATE, body, headers={"Accept": "application/msgpack"}) as answer:
        assert answer.content_type == "application/msgpack"
        response = decode_msgpack(await answer.read())

    choice = as_json["choices"][0]
    assert response.choices[0].token_ids.tolist() == choice["token_ids"]
    assert response.choices[0].logprobs is not None
    assert response.choices[0].logprobs.values.tolist() == [e["logprob"] for e in choice["logprobs"]["content"]]


async def test_the_request_id_of_the_header_wins_and_is_echoed(mock: Served) -> None:
    async with mock.post(GENERATE, {**ask(max_tokens=1), "request_id": "b"}, headers={"X-Request-Id": "h"}) as answer:
        assert (await answer.json())["request_id"] == "h"
        assert answer.headers["X-Request-Id"] == "h"


async def test_the_request_id_of_the_body_is_in_the_header(mock: Served) -> None:
    async with mock.post(GENERATE, {**ask(max_tokens=1), "request_id": "from body"}) as answer:
        assert answer.headers["X-Request-Id"] == "from body"


async def test_every_answer_has_a_request_id(mock: Served) -> None:
    for path in ("/health", "/nowhere"):
        async with mock.get(path) as answer:
            assert answer.headers["X-Request-Id"]


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_over_the_limit_is_a_413_that_says_the_limit(mock: Served, declared: bool) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(11):
            yield b" " * 1000

    data: Any = b" " * 10_001 if declared else parts()
    headers = {"Content-Type": "application/json"}
    async with mock.session.post(mock.url + GENERATE, data=data, headers=headers) as answer:
        error = (await answer.json())["error"]

    assert answer.status == 413
    assert "10000" in error["message"]


@pytest.mark.parametrize(
    ("body", "content_type", "status", "says"),
    [
        (b"{", "application/json", 400, "not JSON"),
        (b"[]", "application/json", 400, "must be an object"),
        (b"\xff\xfe", "application/json", 400, ""),
        (b"{}", "text/plain", 415, "text/plain"),
        (b"{}", "application/json", 400, "token_ids is required"),
        (b'{"token_ids":[true],"sampling_params":{}}', "application/json", 400, "token_ids[0] must be an integer"),
        (b'{"token_ids":["1"],"sampling_params":{}}', "application/json", 400, "token_ids[0] must be an integer"),
        (b'{"token_ids":[],"sampling_params":{}}', "application/json", 400, "must not be empty"),
        (b'{"token_ids":[99999999],"sampling_params":{}}', "application/json", 400, "outside the vocabulary"),
        (b'{"token_ids":[1],"sampling_params":{"max_tokens":0}}', "application/json", 400, "max_tokens must be >= 1"),
        (b'{"token_ids":[1],"sampling_params":{"hm":0}}', "application/json", 400, "sampling_params.hm"),
        (b'{"token_ids":[1],"sampling_params":{},"model":"other"}', "application/json", 404, "'other' does not exist"),
        (b'{"token_ids":[1],"sampling_params":{"stop":["."]}}', "application/json", 400, "stop_token_ids"),
    ],
)
async def test_a_bad_request_is_a_4xx_that_names_the_field(
    mock: Served, body: bytes, content_type: str, status: int, says: str
) -> None:
    headers = {"Content-Type": content_type}
    async with mock.session.post(mock.url + GENERATE, data=body, headers=headers) as answer:
        error = (await answer.json())["error"]

    assert answer.status == status, error
    assert says in error["message"]
    assert set(error) >= {"message", "type", "param", "code"}


async def test_an_overlong_prompt_says_maximum_context_length_and_harms_nobody(mock: Served) -> None:
    """Over-length prompts are the caller's fault: fifty of them and the server is as healthy as before."""
    for _ in range(50):
        refused = await mock.generate({"token_ids": [1] * 64, "sampling_params": {"max_tokens": 1}}, status=400)
        assert "maximum context length" in refused["error"]["message"]
        assert refused["error"]["code"] == "context_length_exceeded"

    await mock.generate(ask(max_tokens=1))
    async with mock.get("/ready") as ready:
        assert ready.status == 200
    assert await mock.metric('rollplane_requests_total{outcome="context_length_exceeded"') == 50


async def test_routes_asked_for_and_unavailable_are_a_400() -> None:
    async with serving(Worker(MockEngine())) as dense:
        refused = await dense.generate({**ask(max_tokens=1), "rollplane": {"routed_experts": True}}, status=400)

    assert refused["error"]["param"] == "rollplane.routed_experts"


async def test_a_live_request_id_with_another_body_is_a_409_and_the_first_is_unharmed() -> None:
    """A retry with the same body attaches to the running request instead."""
    gate = asyncio.Event()

    def script(request: Any) -> list[Any]:
        return [gate, *script_of([len(request.token_ids)] * 2, prompt_tokens=len(request.token_ids))]

    engine = ScriptedEngine(script)
    async with serving(Worker(engine)) as served:
        same = {"request_id": "r", "token_ids": [1, 2], "sampling_params": {"max_tokens": 2}}
        first = asyncio.create_task(served.generate(same))
        await eventually(lambda: _has(engine, 1))
        refused = await served.generate({**same, "token_ids": [9, 9, 9]}, status=409)
        attached = asyncio.create_task(served.generate(same))

        async def both_wait() -> bool:
            return served.service.lifecycle.in_flight == 2

        await eventually(both_wait)
        gate.set()

        assert (await first)["choices"] == (await attached)["choices"]
        assert (await first)["choices"][0]["token_ids"] == [2, 2]
        assert refused["error"]["type"] == "conflict_error"
        assert len(engine.requests) == 1


async def _has(engine: ScriptedEngine, count: int) -> bool:
    return len(engine.requests) >= count


async def test_an_aborted_unary_request_answers_with_all_its_tokens() -> None:
    """Out-of-band aborts lose nothing: status 200, tokens and logprobs so far, finish reason abort."""
    engine = MockEngine(MockSettings(step_s=0.005))
    async with serving(Worker(engine)) as served:
        asked = [
            asyncio.create_task(
                served.generate({**ask(max_tokens=4000, ignore_eos=True, logprobs=1), "request_id": f"r{i}"})
            )
            for i in range(8)
        ]

        async def running() -> bool:
            return (await engine.health()).running == 8

        await eventually(running)
        async with served.post("/abort_requests", {"request_ids": [f"r{i}" for i in range(8)]}) as aborted:
            assert (await aborted.json()) == {"aborted": 8}
        answers = await asyncio.gather(*asked)

    for answer in answers:
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "abort"
        assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) < 4000


async def test_an_abort_of_an_unknown_request_counts_zero(mock: Served) -> None:
    async with mock.post("/engine/abort_request", {"request_id": "nobody"}) as answer:
        assert (await answer.json()) == {"status": "ok", "aborted": 0}


async def test_a_choice_without_tokens_has_empty_logprobs_and_typed_empty_routes() -> None:
    routes = np.empty((0, 2, 2), dtype=np.uint8)
    terminal = script_choice([], finish_reason="abort", logprobs=[], routed_experts=routes)
    info = scripted_info(
        moe=MoeShape(layers=2, top_k=2, num_experts=8),
        capabilities=Capabilities(routed_experts=True, logprobs_mode="sampling"),
    )
    async with serving(ScriptedEngine([terminal, EndEvent()], info=info)) as served:
        answer = await served.generate({**ask(logprobs=1), "rollplane": {"routed_experts": True}})

    choice = answer["choices"][0]
    assert choice["logprobs"] == {"content": []}
    assert choice["routed_experts"] == {"data": "", "shape": [0, 2, 2], "start": 0, "dtype": "uint8"}


async def test_alternatives_that_are_not_finite_never_reach_json(mock: Served) -> None:
    answer = await mock.generate(ask(allowed_token_ids=[7], logprobs=5, max_tokens=3))

    tops = [top["logprob"] for entry in answer["choices"][0]["logprobs"]["content"] for top in entry["top_logprobs"]]
    assert all(-9999.0 <= value <= 0.0 for value in tops)


async def test_a_sampled_logprob_that_is_not_finite_is_a_502_and_counted() -> None:
    engine = MockEngine(MockSettings(faults=(Fault(kind="nan_logprob"),)))
    async with serving(Worker(engine)) as served:
        refused = await served.generate(ask(logprobs=1, max_tokens=4), status=502)

        assert refused["error"]["code"] == "engine_protocol_error"
        assert await served.metric("rollplane_invariant_breaches_total") == 1
        await served.generate(ask(logprobs=1, max_tokens=4))


async def test_floored_alternatives_are_counted() -> None:
    event = ChoiceEvent(
        index=0,
        token_ids=np.array([7], dtype=np.int32),
        finish_reason="length",
        logprobs=TokenLogprobs(
            values=np.array([-0.5], dtype=np.float32),
            alternatives=Alternatives(
                ids=np.array([8], dtype=np.int32),
                values=np.array([-9999.0], dtype=np.float32),
                ranks=np.array([2], dtype=np.int32),
                offsets=np.array([0, 1], dtype=np.int32),
            ),
        ),
    )
    end = EndEvent()
    end.served_by.floored_logprobs = 1
    async with serving(ScriptedEngine([event, end])) as served:
        answer = await served.generate(ask(logprobs=1))

        assert answer["rollplane"]["floored_logprobs"] == 1
        assert await served.metric("rollplane_floored_logprobs_total") == 1


async def test_big_routes_are_one_blob_made_off_the_event_loop() -> None:
    rows, layers, top_k = 30_000, 48, 8
    pattern = np.arange(top_k, dtype=np.uint8)
    routes = np.broadcast_to(pattern, (rows, layers, top_k)).copy()
    tokens = rows + 1 - len(PROMPT)
    engine = ScriptedEngine(
        [script_choice([1] * tokens, routed_experts=routes), EndEvent()],
        info=scripted_info(
            max_model_len=40_000,
            moe=MoeShape(layers=layers, top_k=top_k, num_experts=128),
            capabilities=Capabilities(routed_experts=True, logprobs_mode="sampling"),
        ),
    )
    async with serving(engine) as served:
        submitted = []
        submit = served.service.pool.submit
        served.service.pool.submit = lambda *args: submitted.append(args) or submit(*args)  # type: ignore[method-assign,assignment,func-returns-value]
        answer = await served.generate(ask(max_tokens=tokens))

    found = answer["choices"][0]["routed_experts"]
    assert found["shape"] == [rows, layers, top_k]
    assert pybase64.b64decode(found["data"]) == routes.tobytes()
    assert len(submitted) == 2  # the checks and the text


async def test_a_caller_that_hangs_up_stops_the_work() -> None:
    gate = asyncio.Event()
    engine = ScriptedEngine([gate])
    async with serving(engine) as served:
        asked = [asyncio.create_task(served.generate(ask(max_tokens=8))) for _ in range(50)]
        await eventually(lambda: _has(engine, 50))
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)

        async def all_closed() -> bool:
            return len(engine.closed_early) == 50

        await eventually(all_closed)
        assert await served.metric('rollplane_requests_total{outcome="cancelled"') == 50
        assert served.service.lifecycle.in_flight == 0


async def test_a_request_whose_caller_hung_up_may_be_asked_again_with_its_id() -> None:
    gate = asyncio.Event()
    engine = ScriptedEngine([gate], script_of([4, 5]))
    async with serving(Worker(engine)) as served:
        body = {**ask(max_tokens=2), "request_id": "again"}
        first = asyncio.create_task(served.generate(body))
        await eventually(lambda: _has(engine, 1))
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)

        async def closed() -> bool:
            return engine.closed_early == ["again"]

        await eventually(closed)
        assert (await served.generate(body))["choices"][0]["token_ids"] == [4, 5]


async def test_an_error_that_is_not_ours_is_a_500_without_its_text() -> None:
    async with serving(ScriptedEngine([RuntimeError("secret")])) as served:
        refused = await served.generate(ask(), status=500)

    assert "secret" not in json.dumps(refused)
    assert refused["error"]["code"] == "internal_error"


async def test_a_retryable_error_says_when_to_come_back() -> None:
    async with (
        serving(ScriptedEngine([EngineFailed("it stumbled")])) as served,
        served.post(GENERATE, ask()) as answer,
    ):
        assert answer.status == 502
        assert "x-should-retry" not in answer.headers
    async with serving(ScriptedEngine()) as served:
        served.service.lifecycle.draining = True
        async with served.post(GENERATE, ask()) as answer:
            assert answer.status == 503
            assert int(answer.headers["Retry-After"]) >= 1


async def test_routers_own_errors_have_our_shape(mock: Served) -> None:
    for method, path, status in (("GET", "/nope", 404), ("GET", GENERATE, 405), ("POST", "/health/", 404)):
        async with mock.session.request(method, mock.url + path) as answer:
            error = (await answer.json())["error"]
            assert answer.status == status
            assert set(error) == {"message", "type", "param", "code"}


async def test_a_request_is_held_while_paused_and_answered_after(mock: Served) -> None:
    async with mock.post("/engine/pause_generation", {"mode": "keep"}) as paused:
        assert paused.status == 200
    asked = asyncio.create_task(mock.generate(ask(max_tokens=2)))

    async def held() -> bool:
        return await mock.metric("rollplane_requests_held ") == 1

    await eventually(held)
    assert not asked.done()
    async with mock.post("/engine/resume_generation", {}) as resumed:
        assert resumed.status == 200
    assert len((await asked)["choices"][0]["token_ids"]) == 2


async def test_the_msgpack_request_is_read(mock: Served) -> None:
    body = msgspec.msgpack.encode(ask(max_tokens=2))
    headers = {"Content-Type": "application/msgpack"}
    async with mock.session.post(mock.url + GENERATE, data=body, headers=headers) as answer:
        assert len((await answer.json())["choices"][0]["token_ids"]) == 2
