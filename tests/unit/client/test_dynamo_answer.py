"""Dynamo's answers read back; `folded` is what its frontend makes of the chunks of one choice each."""

from typing import Any

import msgspec
import numpy as np
import pytest

from rollplane.client.dynamo import DynamoClient, is_mendable
from rollplane.client.dynamo_answer import read_answer
from rollplane.dynamo.chunks import generate_chunks
from rollplane.errors import EngineProtocolError, InvalidRequest, RollplaneError, TransportError, Unavailable
from rollplane.protocol.artifacts import Alternatives, PromptLogprobs, RoutedExperts, SamplingMask, TokenLogprobs
from rollplane.protocol.events import ServedBy
from rollplane.protocol.response import Choice, GenerateResponse, Usage

PROMPT = np.array([7, 8, 9], dtype=np.int32)


def int32(*values: int) -> Any:
    return np.array(values, dtype=np.int32)


def float32(*values: float) -> Any:
    return np.array(values, dtype=np.float32)


def response(**changes: Any) -> GenerateResponse:
    choice = Choice(
        index=0,
        token_ids=int32(4, 5),
        finish_reason="abort",
        stop_reason="x",
        logprobs=TokenLogprobs(
            values=float32(-0.1, -2.5),
            alternatives=Alternatives(
                ids=int32(4, 6), values=float32(-0.1, -0.3), ranks=int32(1, 1), offsets=int32(0, 1, 2)
            ),
        ),
        routed_experts=RoutedExperts(array=np.arange(16, dtype=np.uint8).reshape(4, 2, 2)),
        sampling_mask=SamplingMask(ids=int32(4, 6, 5), offsets=int32(0, 2, 3)),
        policy_versions=[("v1", 0), ("v2", 1)],
    )
    whole = GenerateResponse(
        request_id="r-1",
        model="roll",
        created=5,
        choices=[choice],
        usage=Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1),
        prompt_logprobs=PromptLogprobs(
            ids=int32(8, 5, 9), values=float32(-1.5, -0.5, -0.25), ranks=int32(2, 1, 1), offsets=int32(0, 0, 2, 3)
        ),
        prompt_token_ids=PROMPT,
        prompt_token_id_logprobs=[[-1.5]],
        kv_transfer_params={"theirs": 1},
        metrics={"queue_s": 0.5},
        served_by=ServedBy(worker="w", instance="i", adapter_generation=3, logprobs_mode="sampling"),
    )
    return msgspec.structs.replace(whole, **changes)


def folded(whole: GenerateResponse) -> dict[str, Any]:
    choices = []
    data: dict[str, Any] = {}
    for chunk in generate_chunks(whole, partial="length"):
        data |= chunk.get("engine_data", {})
        content = []
        tops = chunk.get("top_logprobs") or [[] for _ in chunk["token_ids"]]
        for token, value, row in zip(chunk["token_ids"], chunk["log_probs"], tops, strict=True):
            top = [{"token": one["token"], "logprob": one["logprob"]} for one in row]
            if all(one["token"] != f"token_id:{token}" for one in top):
                top.append({"token": f"token_id:{token}", "logprob": value})
            content.append({"token": f"token_id:{token}", "logprob": value, "top_logprobs": top})
        choices.append(
            {
                "index": chunk["index"],
                "token_ids": chunk["token_ids"],
                "finish_reason": chunk["finish_reason"],
                "logprobs": {"content": content},
                "routed_experts": chunk["engine_data"].get("routed_experts"),
                "sampling_mask": chunk["engine_data"].get("sampling_mask"),
            }
        )
    # The order of a row's members is not kept.
    rows = [row and dict(sorted(row.items())) for row in data["prompt_logprobs"]]
    kv = data["kv_transfer_params"]
    return {"request_id": whole.request_id, "choices": choices, "prompt_logprobs": rows,
            "kv_transfer_params": kv}  # fmt: skip


def read(tree: dict[str, Any]) -> GenerateResponse:
    return read_answer(msgspec.json.encode(tree), prompt=PROMPT, alternatives=1)


def test_the_answer_is_the_one_that_the_worker_gave() -> None:
    whole = response()
    found = read(folded(whole))

    plain = {name: str(value) for name, value in msgspec.structs.asdict(found).items()}
    assert plain == {name: str(value) for name, value in msgspec.structs.asdict(whole).items()}
    assert found.choices[0].routed_experts is not None
    assert found.choices[0].routed_experts.array.dtype == np.uint8


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("kv_transfer_params",), {"theirs": 1}, "worker that is not Rollplane's"),
        (("kv_transfer_params", "rollplane", "choices"), [], "has the choices [0]"),
        (("kv_transfer_params", "rollplane", "usage"), None, "usage"),
        (("choices", 0, "logprobs", "content", 1, "token"), "token_id:6", "of other tokens"),
        (("choices", 0, "logprobs", "content", 0, "token"), "five", "names its token 'five'"),
        (("choices", 0, "routed_experts", "shape"), [4, 2, 3], "needs 24 bytes, got 16"),
        (("prompt_logprobs",), [None, {"8": {"logprob": -1.0}}], "2 rows for a prompt of 3"),
        (("prompt_logprobs", 1), None, "[1] is null"),
        (("prompt_logprobs", 1), {"5": {"logprob": -1.0}}, "lacks the prompt's own token 8"),
        (("prompt_logprobs", 1), {"8": {"logprob": -1.0}, "x": {"logprob": -1.0}}, "'x'"),
    ],
)
def test_an_answer_that_contradicts_itself_is_none(path: tuple[Any, ...], value: Any, says: str) -> None:
    tree = folded(response())
    inner: Any = tree
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value

    with pytest.raises(EngineProtocolError, match=None) as caught:
        read(tree)
    assert says in caught.value.message


@pytest.mark.parametrize("name", ["idempotency_key", "data_parallel_rank", "max_policy_lag"])
async def test_what_does_not_pass_through_dynamo_is_refused_before_it_is_sent(name: str) -> None:
    async with DynamoClient("http://127.0.0.1:9") as client:
        with pytest.raises(InvalidRequest) as caught:
            await client.generate([1], **{name: 1})  # type: ignore[arg-type]
    assert caught.value.param == name


def test_another_try_is_made_where_a_worker_may_have_been_lost() -> None:
    assert is_mendable(RollplaneError("internal server error"))
    assert is_mendable(Unavailable("busy"))
    assert is_mendable(TransportError("lost"))
    assert not is_mendable(InvalidRequest("no"))
    assert not is_mendable(EngineProtocolError("broken"))
