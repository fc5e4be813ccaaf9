"""What a request may count on, through every hop: defaults, refusals that harm nobody, seeds, choices and ids."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.hops import FRONTEND, FULL_HOPS, HOPS, SIDECAR, WORKER, Chain, chain
from tests.e2e.server_support import GENERATE, Served, data_of, eventually
from tests.models import tiny

from rollplane.client.client import Client
from rollplane.engines.embedded.engine import EmbeddedEngine
from rollplane.engines.embedded.settings import EmbeddedSettings
from rollplane.engines.mock.settings import MockSettings
from rollplane.protocol.info import MoeShape

PROMPT = [5, 6, 7]
CONTEXT = 64
MOE = MoeShape(layers=2, top_k=2, num_experts=8)


@pytest.fixture(params=HOPS)
async def edge(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    async with chain(request.param, MockSettings(max_model_len=CONTEXT)) as made:
        yield made.edge


def embedded(model: Path, **settings: Any) -> EmbeddedEngine:
    return EmbeddedEngine(EmbeddedSettings(model=str(model), threads=1, max_model_len=512, **settings))


def ask(*, token_ids: Any = PROMPT, **sampling: Any) -> dict[str, Any]:
    return {"token_ids": token_ids, "sampling_params": sampling}


def only(tree: dict[str, Any]) -> dict[str, Any]:
    [choice] = tree["choices"]
    return dict(choice)


async def streamed(edge: Served, body: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The choices of a stream by index: ids joined, everything else from the terminal chunk."""
    found: dict[int, dict[str, Any]] = {}
    for chunk in await edge.chunks(body):
        for part in chunk["choices"] if isinstance(chunk, dict) else []:
            choice = found.setdefault(part["index"], {"token_ids": [], "logprobs": []})
            assert "finish_reason" not in choice, "a chunk after the terminal one"
            choice["token_ids"] += part["token_ids"]
            choice["logprobs"] += (part["logprobs"] or {"content": []})["content"]
            if part["finish_reason"] is not None:
                rest = {name: value for name, value in part.items() if name not in ("token_ids", "logprobs")}
                choice.update(rest)
    return found


@pytest.mark.parametrize("left_out", [{}, {"max_tokens": None}], ids=["absent", "null"])
async def test_max_tokens_left_out_is_the_rest_of_the_context_and_16_is_16(
    edge: Served, left_out: dict[str, Any]
) -> None:
    for asked, count in ((left_out, CONTEXT - len(PROMPT)), ({"max_tokens": 16}, 16)):
        body = ask(ignore_eos=True, **asked)
        choice = only(await edge.generate(body))
        assert (len(choice["token_ids"]), choice["finish_reason"]) == (count, "length")
        [choice] = (await streamed(edge, body)).values()
        assert (len(choice["token_ids"]), choice["finish_reason"]) == (count, "length")


HOSTILE: list[Any] = [[99_999_999], [-1], [], [True], ["1"], [1.5], [None], [2**31], [[1]], "1", None, {}]


async def test_a_hostile_prompt_is_a_4xx_and_the_next_request_is_served(edge: Served) -> None:
    for ids in HOSTILE:
        refused = await edge.generate(ask(token_ids=ids, max_tokens=1), status=400)
        assert str(refused["error"]["param"]).startswith("token_ids"), ids
        assert len(only(await edge.generate(ask(max_tokens=3, ignore_eos=True)))["token_ids"]) == 3


async def test_an_added_token_inside_the_embedding_passes_and_the_first_id_behind_it_does_not() -> None:
    model = tiny.shared_model("qwen3", layers=2)
    async with chain(FRONTEND, embedded(model)) as made:
        assert only(await made.edge.generate(ask(token_ids=[tiny.VOCABULARY - 1], max_tokens=1)))["token_ids"]
        refused = await made.edge.generate(ask(token_ids=[5, tiny.VOCABULARY], max_tokens=1), status=400)
        assert refused["error"]["param"] == "token_ids[1]"


@pytest.mark.parametrize("hops", FULL_HOPS)
async def test_stop_strings_without_a_tokenizer_are_refused_and_point_at_stop_ids(hops: str) -> None:
    async with chain(hops, MockSettings()) as made:
        for stop in (["."], "."):
            for stream in (False, True):
                refused = await made.edge.generate(
                    {**ask(token_ids=[1], stop=stop, max_tokens=64), "stream": stream}, status=400
                )
                assert refused["error"]["param"] == "sampling_params.stop"
                assert "stop_token_ids" in refused["error"]["message"]


@pytest.mark.parametrize("hops", FULL_HOPS)
async def test_stop_strings_with_a_tokenizer_end_the_output(hops: str) -> None:
    from tokenizers import Tokenizer

    model = tiny.shared_model("qwen3", layers=2)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    async with chain(hops, embedded(model)) as made:
        free = only(await made.edge.generate(ask(seed=3, max_tokens=40, ignore_eos=True)))["token_ids"]
        stop = next(text for i in free[8:] if len(text := tokenizer.decode([i])) > 1 and "\ufffd" not in text)
        cut = next(n for n in range(1, len(free) + 1) if stop in tokenizer.decode(free[:n]))
        body = ask(seed=3, max_tokens=40, ignore_eos=True, stop=[stop])

        for choice in (only(await made.edge.generate(body)), (await streamed(made.edge, body))[0]):
            assert choice["token_ids"] == free[:cut]
            assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


@pytest.mark.parametrize("hops", FULL_HOPS)
async def test_stop_ids_outside_the_vocabulary_change_nothing_for_their_neighbours(hops: str) -> None:
    """Sixteen bad requests while a seeded one runs on a real model: each is refused, the seeded one is as ever."""
    async with chain(hops, embedded(tiny.shared_model("qwen3", layers=2))) as made:
        control = ask(seed=5, max_tokens=120, ignore_eos=True, logprobs=0)
        before = only(await made.edge.generate(control))
        running = asyncio.create_task(made.edge.generate(control))
        await eventually(lambda: _runs(made, 1))
        bad = ask(token_ids=[1], stop_token_ids=[2_000_000_000], min_tokens=1, max_tokens=4)
        for _ in range(16):
            refused = await made.edge.generate(bad, status=400)
            assert refused["error"]["param"] == "sampling_params.stop_token_ids"
            assert str(tiny.VOCABULARY) in refused["error"]["message"]
        beside = only(await running)

    assert beside["token_ids"] == before["token_ids"]


async def _runs(made: Chain, count: int) -> bool:
    return (await made.engine.health()).running >= count


WIDE: list[tuple[str, Any, int]] = [
    ("allowed_token_ids", list(range(2000)), 1024),
    ("stop_token_ids", list(range(200)), 128),
    ("logit_bias", {str(i): 1.0 for i in range(1500)}, 1024),
]


async def test_a_list_over_the_engines_width_is_a_400_with_the_limit_and_harms_nobody(edge: Served) -> None:
    for field, value, limit in WIDE:
        refused = await edge.generate(ask(max_tokens=2, **{field: value}), status=400)
        assert refused["error"]["param"] == f"sampling_params.{field}"
        assert f"{len(value)} entries, the limit is {limit}" in refused["error"]["message"]
        async with edge.get("/health") as health:
            assert health.status == 200
        await edge.generate(ask(max_tokens=2))


@pytest.mark.parametrize("hops", FULL_HOPS)
async def test_sampling_defaults_of_the_models_directory_are_not_applied(hops: str, tmp_path: Path) -> None:
    """`generation_config.json` with top_k 1 and a low temperature: eight unseeded answers still differ."""
    model = tmp_path / "model"
    shutil.copytree(tiny.shared_model("qwen3", layers=2), model)
    config = json.loads((model / "generation_config.json").read_text())
    config |= {"top_k": 1, "top_p": 0.01, "temperature": 0.01, "repetition_penalty": 1.9, "do_sample": True}
    (model / "generation_config.json").write_text(json.dumps(config))
    async with chain(hops, embedded(model)) as made:
        body = {**ask(temperature=1.0, max_tokens=32), "rollplane": {"echo_sampling": True}}
        answers = [await made.edge.generate(body) for _ in range(8)]
        del body["sampling_params"]["temperature"]
        bare = await made.edge.generate(body)

    assert len({tuple(only(answer)["token_ids"]) for answer in answers}) == 8
    for answer in [*answers, bare]:
        applied = answer["rollplane"]["effective_sampling"]
        neutral = {"top_k": 0, "top_p": 1.0, "temperature": 1.0, "repetition_penalty": 1.0, "max_tokens": 32}
        assert {name: applied[name] for name in neutral} == neutral


NO_TOP_K: list[dict[str, Any]] = [{}, {"top_k": None}, {"top_k": 0}, {"top_k": -1}]


async def test_no_top_k_has_four_spellings_and_one_meaning(edge: Served) -> None:
    answers = [only(await edge.generate(ask(seed=9, max_tokens=40, ignore_eos=True, **k))) for k in NO_TOP_K]

    assert all(answer["token_ids"] == answers[0]["token_ids"] for answer in answers)
    one = only(await edge.generate(ask(seed=9, max_tokens=40, ignore_eos=True, top_k=1)))
    assert one["token_ids"] != answers[0]["token_ids"], "top_k has no effect here, so this test would show nothing"


async def test_no_top_k_has_four_spellings_on_a_real_model() -> None:
    async with chain(FRONTEND, embedded(tiny.shared_model("qwen3", layers=2))) as made:
        answers = [only(await made.edge.generate(ask(seed=9, max_tokens=24, **k))) for k in NO_TOP_K]

    assert all(answer["token_ids"] == answers[0]["token_ids"] for answer in answers)


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "streamed"])
@pytest.mark.parametrize("hops", HOPS)
async def test_choices_of_one_seed_differ_and_end_each_on_its_own(hops: str, stream: bool) -> None:
    """Four choices; one ends early at a stop id. Each has its own tokens, logprobs and finish reason."""
    async with chain(hops, MockSettings(vocab_tokens=512)) as made:

        async def choices(**more: Any) -> dict[int, dict[str, Any]]:
            body = ask(n=4, seed=7, temperature=1.0, max_tokens=24, ignore_eos=True, logprobs=0, **more)
            if stream:
                return await streamed(made.edge, body)
            found = (await made.edge.generate(body))["choices"]
            return {c["index"]: {**c, "logprobs": c["logprobs"]["content"]} for c in found}

        free = await choices()
        stop = free[2]["token_ids"][5]
        uneven = await choices(stop_token_ids=[stop])

    assert sorted(free) == sorted(uneven) == [0, 1, 2, 3]
    assert len({tuple(choice["token_ids"]) for choice in free.values()}) == 4
    lengths = set()
    for index, choice in uneven.items():
        ids = free[index]["token_ids"]
        cut = ids[: ids.index(stop) + 1] if stop in ids else ids
        assert choice["token_ids"] == cut
        assert choice["finish_reason"] == ("stop" if stop in ids else "length")
        assert [entry["token"] for entry in choice["logprobs"]] == [f"token_id:{i}" for i in cut]
        assert [e["logprob"] for e in choice["logprobs"]] == [e["logprob"] for e in free[index]["logprobs"]][: len(cut)]
        lengths.add(len(cut))
    assert len(lengths) > 1


@pytest.mark.parametrize("hops", FULL_HOPS)
async def test_every_choice_has_routes_and_a_mask_of_its_own(hops: str) -> None:
    """On a real mixture: what a choice of n carries is what a single request of seed + index carries."""
    asked: dict[str, Any] = {"temperature": 1.0, "top_k": 6, "max_tokens": 10, "ignore_eos": True, "logprobs": 0}
    async with (
        chain(hops, embedded(tiny.shared_model("qwen3-moe", layers=2))) as made,
        Client(made.edge.url) as client,
    ):
        many = await client.generate(PROMPT, sampling_params={**asked, "n": 3, "seed": 20}, sampling_mask=True)
        for index, choice in enumerate(many.choices):
            single = await client.generate(PROMPT, sampling_params={**asked, "seed": 20 + index}, sampling_mask=True)
            own = single.choices[0]
            assert choice.routed_experts is not None
            assert own.routed_experts is not None
            assert choice.sampling_mask is not None
            assert own.sampling_mask is not None
            assert choice.token_ids.tolist() == own.token_ids.tolist()
            assert choice.routed_experts.array.tobytes() == own.routed_experts.array.tobytes()
            assert choice.sampling_mask.rows() == own.sampling_mask.rows()


@pytest.mark.parametrize("hops", [FRONTEND, SIDECAR])
async def test_one_id_for_two_prompts_is_a_conflict_and_swaps_nothing(hops: str) -> None:
    async with chain(hops, MockSettings(step_s=0.003)) as made:
        first = {**ask(seed=1, max_tokens=200, ignore_eos=True), "request_id": "one"}
        second = {**first, "token_ids": [9, 9, 9, 9]}
        alone = {
            key: only(await made.edge.generate({**body, "request_id": f"alone-{key}"}))["token_ids"]
            for key, body in (("first", first), ("second", second))
        }
        running = asyncio.create_task(made.edge.generate(first))
        await eventually(lambda: _runs(made, 1))
        refused = await made.edge.generate(second, status=409)
        joined = asyncio.create_task(made.edge.generate(first))

        assert "one" in refused["error"]["message"]
        assert only(await running)["token_ids"] == only(await joined)["token_ids"] == alone["first"]
        assert only(await made.edge.generate(second))["token_ids"] == alone["second"]


async def test_an_unknown_option_is_refused_by_name(edge: Served) -> None:
    for body, param in (
        ({**ask(max_tokens=1), "rollplane": {"routed_experts_start": 3}}, "rollplane"),
        (ask(max_tokens=1, routed_experts_start=3), "sampling_params.routed_experts_start"),
        ({**ask(max_tokens=1), "routed_experts_start": 3}, "routed_experts_start"),
    ):
        refused = await edge.generate(body, status=400)
        assert str(refused["error"]["param"]).startswith(param)


@pytest.mark.parametrize("role", [WORKER, FRONTEND])
async def test_streams_are_in_the_description_and_work(role: str) -> None:
    async with chain(role, MockSettings()) as made:
        async with made.edge.get("/openapi.json") as answer:
            tree = await answer.json()
        operation = tree["paths"][GENERATE]["post"]
        reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        assert "text/event-stream" in operation["responses"]["200"]["content"]
        assert "stream" in tree["components"]["schemas"][reference.rsplit("/", 1)[1]]["properties"]
        async with made.edge.post(GENERATE, {**ask(max_tokens=3), "stream": True}) as answer:
            assert answer.status == 200
            assert data_of(await answer.read())[-1] == "[DONE]"
