import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest

from rollplane.dynamo.chunks import delta_chunk, generate_chunks
from rollplane.engines.mock.engine import MockEngine
from rollplane.engines.mock.settings import MockSettings
from rollplane.errors import EngineProtocolError
from rollplane.protocol.artifacts import Alternatives, decode_routes_structured
from rollplane.protocol.events import ChoiceEvent
from rollplane.protocol.info import MoeShape
from rollplane.protocol.response import GenerateResponse
from rollplane.testing import answer, make_request

MOE = MoeShape(layers=2, top_k=2, num_experts=8)


@pytest.fixture(scope="module")
def response() -> GenerateResponse:
    async def made() -> GenerateResponse:
        engine = MockEngine(MockSettings(moe=MOE, sampling_mask=True))
        await engine.start()
        request = make_request(
            n=2, max_tokens=3, top_k=3, seed=1, logprobs=2, prompt_logprobs=1, fields={"return_token_ids": True}
        )
        try:
            return await answer(engine, request)
        finally:
            await engine.close()

    return asyncio.run(made())


def test_a_choice_is_one_terminal_chunk_with_everything(response: GenerateResponse) -> None:
    chunks = generate_chunks(response)

    assert [chunk["index"] for chunk in chunks] == [0, 1]
    for chunk, choice in zip(chunks, response.choices, strict=True):
        assert chunk["token_ids"] == choice.token_ids.tolist()
        assert chunk["finish_reason"] == "length"
        assert choice.logprobs is not None
        assert chunk["log_probs"] == choice.logprobs.values.tolist()
        assert [[cell["rank"] for cell in row] for row in chunk["top_logprobs"]] == [[1, 2]] * 3
        assert choice.sampling_mask is not None
        assert chunk["engine_data"]["sampling_mask"] == choice.sampling_mask.rows()
        routes = decode_routes_structured(chunk["engine_data"]["routed_experts"])
        assert choice.routed_experts is not None
        np.testing.assert_array_equal(routes.array, choice.routed_experts.array)


def test_tokens_that_are_the_likeliest_are_listed_by_the_frontend_itself(response: GenerateResponse) -> None:
    choice = response.choices[0]
    assert choice.logprobs is not None
    count = choice.token_ids.size
    top = Alternatives(
        ids=choice.token_ids,
        values=choice.logprobs.values,
        ranks=np.ones(count, dtype=np.int32),
        offsets=np.arange(count + 1, dtype=np.int32),
    )
    greedy = msgspec.structs.replace(choice, logprobs=msgspec.structs.replace(choice.logprobs, alternatives=top))
    (chunk,) = generate_chunks(msgspec.structs.replace(response, choices=[greedy]))

    assert "top_logprobs" not in chunk
    assert chunk["log_probs"] == choice.logprobs.values.tolist()


def test_what_belongs_to_all_choices_is_on_the_last_chunk(response: GenerateResponse) -> None:
    first, last = generate_chunks(response)

    assert set(first["engine_data"]) == {"routed_experts", "sampling_mask"}
    prompt = last["engine_data"]["prompt_logprobs"]
    assert prompt[0] is None
    assert [next(iter(row)) for row in prompt[1:]] == ["6", "7"]
    passed = last["engine_data"]["kv_transfer_params"]["rollplane"]
    assert [choice["policy_versions"] for choice in passed["choices"]] == [[["initial", 0]]] * 2
    assert passed["usage"] == {
        "prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9, "prompt_tokens_details": {"cached_tokens": 0}
    }  # fmt: skip
    assert passed["prompt_token_ids"] == [5, 6, 7]
    assert (passed["wire"], passed["logprobs_mode"]) == (1, "sampling")


def test_the_chunks_are_plain_values(response: GenerateResponse) -> None:
    chunks = generate_chunks(response)

    assert msgspec.json.decode(msgspec.json.encode(chunks)) == chunks


def ended(response: GenerateResponse, reason: Any) -> GenerateResponse:
    choice = msgspec.structs.replace(response.choices[0], finish_reason=reason)
    return msgspec.structs.replace(response, choices=[choice])


@pytest.mark.parametrize(
    ("reason", "partial", "says"),
    [("abort", "refuse", "cancelled"), ("abort", "length", "length"), ("repetition", "refuse", "stop"), ("stop", "refuse", "stop")],
)  # fmt: skip
def test_a_finish_reason_is_one_that_dynamo_folds_and_the_truth_is_passed_through(
    response: GenerateResponse, reason: Any, partial: Any, says: str
) -> None:
    (chunk,) = generate_chunks(ended(response, reason), partial=partial)

    assert chunk["finish_reason"] == says
    assert chunk["engine_data"]["kv_transfer_params"]["rollplane"]["choices"][0]["finish_reason"] == reason


def test_the_engines_own_transfer_parameters_stay_beside_ours(response: GenerateResponse) -> None:
    theirs = msgspec.structs.replace(response, kv_transfer_params={"block": 7})

    assert generate_chunks(theirs)[-1]["engine_data"]["kv_transfer_params"].keys() == {"block", "rollplane"}


def test_an_engine_cannot_write_our_member(response: GenerateResponse) -> None:
    with pytest.raises(EngineProtocolError, match="rollplane"):
        generate_chunks(msgspec.structs.replace(response, kv_transfer_params={"rollplane": {}}))


def test_a_delta_has_no_finish_and_the_end_says_the_versions() -> None:
    ids = np.array([4, 5], dtype=np.int32)

    assert delta_chunk(ChoiceEvent(index=1, token_ids=ids)) == {"index": 1, "token_ids": [4, 5]}
    end = delta_chunk(ChoiceEvent(index=0, token_ids=ids, finish_reason="stop", policy_versions=[("v1", 0)]))
    assert end["finish_reason"] == "stop"
    assert end["engine_data"]["rollplane"]["policy_versions"] == [["v1", 0]]
