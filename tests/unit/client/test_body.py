import msgspec
import numpy as np
import pytest

from rollplane.client.body import make_body, token_array
from rollplane.errors import InvalidRequest
from rollplane.protocol.features import MediaItem
from rollplane.protocol.request import GenerateRequest, parse_request

PAYLOAD = msgspec.msgpack.encode({"pixel_values": b"raw"})


def read(**options: object) -> GenerateRequest:
    body = make_body([5, 6, 7], sampling_params={"max_tokens": 4}, **options)  # type: ignore[arg-type]
    headers = {name.lower(): value for name, value in body.headers.items()}
    return parse_request(body.content, content_type=body.headers["Content-Type"], headers=headers)


def test_the_server_reads_what_was_asked() -> None:
    request = read(
        request_id="r",
        model="m",
        group_id="g",
        session_id="s",
        routed_experts=True,
        sampling_mask=False,
        min_policy_version="v1",
        cache_salt="salt",
        priority=-3,
        deadline_s=9.5,
        echo_sampling=True,
        idempotency_key="key",
        data_parallel_rank=0,
        return_token_ids=True,
        extra={"unknown_to_us": 1},
    )
    assert request.token_ids.tolist() == [5, 6, 7]
    assert (request.request_id, request.model, request.cache_salt, request.priority) == ("r", "m", "salt", -3)
    assert (request.idempotency_key, request.data_parallel_rank, request.return_token_ids) == ("key", 0, True)
    assert request.extra == {"unknown_to_us": 1}
    options = request.options
    assert (options.group_id, options.session_id, options.min_policy_version) == ("g", "s", "v1")
    assert (options.routed_experts, options.sampling_mask, options.deadline_s) == (True, False, 9.5)
    assert options.echo_sampling is True


def test_what_was_not_asked_is_not_sent() -> None:
    request = read()
    assert request.options.routed_experts is None
    assert request.options.deadline_s is None
    assert request.sampling.given() == {"max_tokens": 4}
    assert not request.stream


def test_every_request_has_an_id_of_its_own() -> None:
    assert make_body([1]).request_id != make_body([1]).request_id


def test_media_items_travel_as_their_envelope() -> None:
    item = MediaItem(modality="image", producer_hash="h", offset=1, length=2, kwargs=PAYLOAD)
    (found,) = read(features=[item]).features or []
    assert (found.modality, found.offset, found.length, found.kwargs) == ("image", 1, 2, PAYLOAD)


def test_the_plan_holds_the_answer_to_what_was_asked() -> None:
    plan = make_body(
        [5, 6, 7],
        sampling_params={"n": 2, "logprobs": 0, "prompt_logprobs": 1, "routed_experts_prompt_start": 1},
        routed_experts=True,
    ).plan
    assert (plan.choices, plan.prompt_tokens, plan.logprobs, plan.prompt_logprobs) == (2, 3, True, True)
    assert (plan.routes, plan.mask, plan.routes_start) == (True, None, 1)
    raw = make_body([5], content_parts=[{"type": "image_url", "url": "http://x/a.png"}]).plan
    assert raw.prompt_tokens is None


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([], "must not be empty"),
        ([1, True], "got bool"),
        ([1, 2.0], "got float"),
        (["1"], "got str"),
        ([1, -1], "hold -1"),
        ([2**31], "hold 2147483648"),
        ([2**70], "token_ids"),
        (np.zeros((1, 2), dtype=np.int64), r"int64\[1, 2\]"),
        (np.array([1.0]), r"float64\[1\]"),
    ],
)
def test_what_is_no_prompt_is_refused_before_it_is_sent(ids: object, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        token_array(ids)  # type: ignore[arg-type]


@pytest.mark.parametrize("ids", [[1, 2], (1, 2), np.array([1, 2]), np.array([1, 2], dtype=np.uint16), [np.int64(1), 2]])
def test_any_sequence_of_integers_is_a_prompt(ids: object) -> None:
    array = token_array(ids)  # type: ignore[arg-type]
    assert array.dtype == np.int32
    assert array.tolist() == [1, 2]


def test_a_field_with_its_own_argument_is_not_taken_as_extra() -> None:
    with pytest.raises(InvalidRequest, match=r"extra\.model"):
        make_body([1], extra={"model": "m"})
