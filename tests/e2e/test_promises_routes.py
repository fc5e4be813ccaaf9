"""What routed experts may be counted on for, through every hop that can carry them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.e2e.hops import FRONTEND, FULL_HOPS, HOPS, chain
from tests.e2e.server_support import GENERATE, Served, data_of
from tests.models import tiny

from rollplane.client.client import Client
from rollplane.client.replay import RoutedTurn, stitch_routes
from rollplane.engines.base import Engine
from rollplane.engines.embedded.engine import EmbeddedEngine
from rollplane.engines.embedded.settings import EmbeddedSettings
from rollplane.engines.mock.engine import MockEngine
from rollplane.engines.mock.settings import Fault, FaultKind, MockSettings
from rollplane.protocol.answer import decode_msgpack
from rollplane.protocol.artifacts import decode_routes_structured
from rollplane.protocol.events import EndEvent
from rollplane.protocol.info import Capabilities, MoeShape
from rollplane.testing import ScriptedEngine, script_choice, scripted_info

PROMPT = [5, 6, 7]
MOE = MoeShape(layers=3, top_k=4, num_experts=512)


def embedded_moe(model: Path | None = None) -> EmbeddedEngine:
    path = model or tiny.shared_model("qwen3-moe", layers=2)
    return EmbeddedEngine(EmbeddedSettings(model=str(path), threads=1, max_model_len=1024, policy_version="v0"))


def mixture(name: str) -> Engine:
    return MockEngine(MockSettings(moe=MOE)) if name == "mock" else embedded_moe()


def ask(token_ids: list[int], **sampling: Any) -> dict[str, Any]:
    body = {"token_ids": token_ids, "sampling_params": {"ignore_eos": True, **sampling}}
    return {**body, "rollplane": {"routed_experts": True}}


@pytest.mark.parametrize(("top", "dtype"), [(255, "uint8"), (256, "uint16"), (511, "uint16")])
@pytest.mark.parametrize("hops", FULL_HOPS)
async def test_expert_ids_arrive_whole_in_a_type_that_the_payload_names(hops: str, top: int, dtype: str) -> None:
    rows = np.array([[[top, 1]], [[0, top]], [[255, 7]]]).astype(np.uint16 if top > 255 else np.uint8)
    info = scripted_info(
        moe=MoeShape(layers=1, top_k=2, num_experts=512),
        capabilities=Capabilities(routed_experts=True, sampling_fields=["ignore_eos"]),
    )
    engine = ScriptedEngine([script_choice([9], routed_experts=rows), EndEvent()], info=info)
    async with chain(hops, engine) as made, Client(made.edge.url) as client:
        as_json = (await made.edge.generate(ask(PROMPT)))["choices"][0]["routed_experts"]
        packed = (await client.generate(PROMPT, routed_experts=True)).choices[0].routed_experts

    assert as_json["dtype"] == dtype
    assert decode_routes_structured(as_json).array.tolist() == rows.tolist()
    assert packed is not None
    assert packed.array.dtype.name == dtype
    assert packed.array.tolist() == rows.tolist()


@pytest.mark.parametrize("engine", ["mock", "embedded"])
@pytest.mark.parametrize("hops", FULL_HOPS)
async def test_the_next_turn_has_the_row_of_the_former_last_token(hops: str, engine: str) -> None:
    """rows = prompt + completion - 1; what a turn lacks, the next one gives, and it equals a cold full run."""
    observed = [40, 41, 42]
    async with chain(hops, mixture(engine)) as made, Client(made.edge.url) as client:

        async def turn(prompt: list[int], start: int) -> RoutedTurn:
            asked = {"max_tokens": 6, "temperature": 0.0, "routed_experts_prompt_start": start, "ignore_eos": True}
            choice = (await client.generate(prompt, sampling_params=asked, routed_experts=True)).choices[0]
            assert choice.routed_experts is not None
            assert choice.routed_experts.start == start
            outputs.append(choice.token_ids.tolist())
            return RoutedTurn(
                rows=choice.routed_experts.array, prompt_tokens=len(prompt), completion_tokens=6, start=start
            )

        outputs: list[list[int]] = []
        first = await turn(PROMPT, 0)
        second_prompt = [*PROMPT, *outputs[0], *observed]
        second = await turn(second_prompt, len(PROMPT) + 6 - 1)
        cold = await turn(second_prompt, 0)

    assert len(first.rows) == len(PROMPT) + 6 - 1
    assert second.rows[0].any()
    assert second.rows.tobytes() == np.ascontiguousarray(cold.rows[second.start :]).tobytes()
    stitched = stitch_routes([first, second])
    assert stitched.tolist() == cold.rows.tolist()


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "streamed"])
@pytest.mark.parametrize("engine", ["mock", "embedded"])
async def test_the_start_is_honoured_and_stated_and_one_past_the_prompt_is_a_400(engine: str, stream: bool) -> None:
    prompt = [7 + i % 400 for i in range(120)]
    async with chain(FRONTEND, mixture(engine)) as made:

        async def routes(**asked: Any) -> dict[str, Any]:
            body = ask(prompt, max_tokens=5, seed=1, **asked)
            if not stream:
                return dict((await made.edge.generate(body))["choices"][0]["routed_experts"])
            chunks = await made.edge.chunks(body)
            [found] = [c["routed_experts"] for x in chunks[:-1] for c in x["choices"] if c.get("routed_experts")]
            return dict(found)

        whole, tail = await routes(), await routes(routed_experts_prompt_start=100)
        for start in (120, 121, 4000):
            body = {**ask(prompt, max_tokens=5, routed_experts_prompt_start=start), "stream": stream}
            refused = await made.edge.generate(body, status=400)
            assert refused["error"]["param"] == "sampling_params.routed_experts_prompt_start"
            assert "120" in refused["error"]["message"]

    assert (whole["start"], whole["shape"][0]) == (0, 120 + 5 - 1)
    assert (tail["start"], tail["shape"][0]) == (100, 120 + 5 - 1 - 100)
    rows = decode_routes_structured(whole).array[100:]
    assert decode_routes_structured(tail).array.tolist() == rows.tolist()


@pytest.mark.parametrize("clear_cache", [False, True], ids=["kept-cache", "cleared-cache"])
@pytest.mark.parametrize("hops", FULL_HOPS)
async def test_routes_from_before_an_update_stay_and_recomputed_rows_are_named(hops: str, clear_cache: bool) -> None:
    """A long sample over pause, new weights and resume, against the same sample without them."""
    other = tiny.shared_model("qwen3-moe", layers=2, seed=1)
    body = ask(PROMPT, max_tokens=200, seed=6)
    async with chain(hops, embedded_moe()) as made:
        before = (await made.edge.generate(body))["choices"][0]
        async with made.edge.post(GENERATE, {**body, "stream": True}) as answer:
            for _ in range(6):
                await answer.content.readuntil(b"\n\n")
            flag = "true" if clear_cache else "false"
            await _post(made.edge, f"/pause?mode=keep&clear_cache={flag}")
            await _post(made.edge, "/update_weights", {"weight_dir": str(other)})
            await _post(made.edge, "/resume")
            chunks = [chunk for chunk in data_of(await answer.read()) if chunk != "[DONE]"]

    terminal = chunks[-2]["choices"][0]
    [(first, _), (second, boundary)] = terminal["policy_versions"]
    assert (first, second) == ("v0", other.name)
    assert 0 < boundary < 200
    rows = len(PROMPT) + boundary - 1
    old, new = (decode_routes_structured(choice["routed_experts"]).array for choice in (before, terminal))
    assert old[:rows].tolist() == new[:rows].tolist()
    assert old[rows:].tolist() != new[rows:].tolist()
    assert chunks[-1]["rollplane"].get("recomputed", []) == ([[0, rows]] if clear_cache else [])


async def _post(edge: Served, path: str, body: Any = None) -> None:
    async with edge.post(path, body if body is not None else {}) as answer:
        assert answer.status == 200, await answer.read()


BROKEN: list[tuple[FaultKind, str]] = [
    ("routes_zero", "zero"),
    ("routes_repeat", "repeats an expert"),
    ("routes_row_missing", "routed rows, must be"),
    ("routes_missing", "missing"),
]


@pytest.mark.parametrize(("kind", "says"), BROKEN)
@pytest.mark.parametrize("hops", FULL_HOPS)
async def test_routes_that_cannot_be_true_fail_the_request(hops: str, kind: FaultKind, says: str) -> None:
    """All zero, an expert twice, a row short, none at all: an error with the numbers, never an answer."""
    async with chain(hops, MockSettings(moe=MOE, faults=(Fault(kind=kind, times=9),))) as made:
        refused = await made.edge.generate(ask(PROMPT, max_tokens=6), status=502)
        assert refused["error"]["code"] == "engine_protocol_error"
        assert says in refused["error"]["message"]
        chunks = await made.edge.chunks(ask(PROMPT, max_tokens=6))
        assert chunks[-1]["error"]["code"] == "engine_protocol_error"
        assert not any(choice["finish_reason"] for chunk in chunks[:-1] for choice in chunk["choices"])


@pytest.mark.parametrize("engine", ["mock", "embedded", "scripted"])
@pytest.mark.parametrize("hops", FULL_HOPS)
async def test_every_engines_routes_are_read_by_one_strict_decoder(hops: str, engine: str) -> None:
    """One encoding whatever made it: the same object in JSON and in a stream, and the same rows in msgpack."""
    rows = np.arange(24, dtype=np.uint8).reshape(4, 3, 2)
    info = scripted_info(
        moe=MoeShape(layers=3, top_k=2, num_experts=24),
        capabilities=Capabilities(routed_experts=True, sampling_fields=["seed", "ignore_eos"]),
    )
    scripted = ScriptedEngine([script_choice([9, 9], routed_experts=rows), EndEvent()], info=info)
    body = ask(PROMPT, seed=3, max_tokens=2)
    async with chain(hops, scripted if engine == "scripted" else mixture(engine)) as made:
        unary = await made.edge.generate(body)
        chunks = await made.edge.chunks(body)
        async with made.edge.post(GENERATE, body, headers={"Accept": "application/msgpack"}) as answer:
            packed = decode_msgpack(await answer.read())

    [streamed] = [c["routed_experts"] for x in chunks[:-1] for c in x["choices"] if c.get("routed_experts")]
    found = unary["choices"][0]["routed_experts"]
    assert list(found) == ["data", "shape", "start", "dtype"]
    assert streamed == found
    routes = packed.choices[0].routed_experts
    assert routes is not None
    decoded = decode_routes_structured(found)
    assert (decoded.array.tobytes(), decoded.start) == (routes.array.tobytes(), routes.start)
    assert unary["rollplane"]["wire"] == chunks[-2]["rollplane"]["wire"] == packed.wire == 1


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "streamed"])
@pytest.mark.parametrize("hops", HOPS)
async def test_routes_and_masks_that_are_not_there_are_refused_at_once(hops: str, stream: bool) -> None:
    async with chain(hops, MockSettings()) as made:
        for name in ("routed_experts", "sampling_mask"):
            body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2, "top_k": 4}, "stream": stream}
            refused = await made.edge.generate({**body, "rollplane": {name: True}}, status=400)
            assert refused["error"]["param"] == f"rollplane.{name}"


@pytest.mark.parametrize("hops", FULL_HOPS)
async def test_a_mixture_that_was_started_without_capture_says_so(hops: str) -> None:
    engine = ScriptedEngine(info=scripted_info(moe=MOE, capabilities=Capabilities(sampling_fields=["ignore_eos"])))
    async with chain(hops, engine) as made:
        refused = await made.edge.generate(ask(PROMPT, max_tokens=2), status=400)

    assert "without route capture" in refused["error"]["message"]
    assert engine.requests == []


async def test_the_bytes_of_a_turn_do_not_grow_with_the_conversation() -> None:
    """A hundred turns of 320 tokens, each asking only for the rows that no turn before it gave."""
    turns, out, observed = 100, 300, 20
    moe = MoeShape(layers=2, top_k=2, num_experts=8)
    settings = MockSettings(moe=moe, max_model_len=turns * (out + observed) + 64)
    history, sizes, rows = list(range(7, 27)), [], 0
    async with chain(FRONTEND, settings) as made, Client(made.edge.url) as client:
        for turn in range(turns):
            start = max(len(history) - observed - 1, 0) if turn else 0
            asked = {"max_tokens": out, "seed": turn, "ignore_eos": True, "routed_experts_prompt_start": start}
            choice = (await client.generate(history, sampling_params=asked, routed_experts=True)).choices[0]
            assert choice.routed_experts is not None
            assert choice.routed_experts.start == start == rows
            sizes.append(choice.routed_experts.array.nbytes)
            rows += len(choice.routed_experts.array)
            history += [*choice.token_ids.tolist(), *range(30, 30 + observed)]

    assert len(set(sizes[1:])) == 1
    assert sizes[1] == (out + observed) * moe.layers * moe.top_k
    assert rows == len(history) - observed - 1
