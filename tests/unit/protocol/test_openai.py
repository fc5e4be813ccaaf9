"""OpenAI's bodies as sampling parameters and prompts."""

from typing import Any

import msgspec
import pytest

from rollplane.errors import Conflict, ContextOverflow, InvalidRequest
from rollplane.protocol.openai import (
    in_callers_words,
    own_names,
    parse_chat,
    parse_completion,
    prompts_of,
    sampling_of,
)

MESSAGES = [{"role": "user", "content": "x"}]


def completion(**fields: Any) -> Any:
    return parse_completion(msgspec.json.encode({"prompt": "x", **fields}))


def chat(**fields: Any) -> Any:
    return parse_chat(msgspec.json.encode({"messages": MESSAGES, **fields}))


def test_logprobs_mean_what_openai_means_on_each_route() -> None:
    assert sampling_of(completion(logprobs=3)).given() == {"logprobs": 3}
    assert sampling_of(chat(logprobs=True, top_logprobs=2)).given() == {"logprobs": 2}
    assert sampling_of(chat(logprobs=True)).given() == {"logprobs": 0}
    assert sampling_of(chat(logprobs=False)).given() == {}


def test_the_limit_has_two_names_on_chats_which_must_agree() -> None:
    assert sampling_of(chat(max_completion_tokens=7)).given() == {"max_tokens": 7}
    with pytest.raises(InvalidRequest, match="max_completion_tokens is 7 and max_tokens 8"):
        chat(max_completion_tokens=7, max_tokens=8)


def test_a_limit_left_out_stays_left_out() -> None:
    assert sampling_of(completion()).get("max_tokens") is None


def test_a_schema_becomes_structured_outputs() -> None:
    schema = {"type": "object"}
    asked = chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}})

    assert sampling_of(asked).get("structured_outputs") == {"json": schema}
    assert sampling_of(chat(response_format={"type": "text"})).get("structured_outputs") is None


def test_logit_bias_takes_openais_string_keys() -> None:
    assert sampling_of(completion(logit_bias={"50": -100})).get("logit_bias") == {50: -100.0}


@pytest.mark.parametrize(
    ("prompt", "sizes"), [("ab", ["ab"]), ([1, 2], [2]), (["a", "b"], ["a", "b"]), ([[1], [2, 3]], [1, 2])]
)
def test_prompts_are_texts_or_ids_one_or_several(prompt: Any, sizes: list[Any]) -> None:
    found = prompts_of(completion(prompt=prompt))

    assert [each if isinstance(each, str) else each.size for each in found] == sizes


def test_too_many_prompts_are_refused_with_the_limit() -> None:
    with pytest.raises(InvalidRequest, match="holds 3 prompts, the limit is 2"):
        prompts_of(completion(prompt=["a"] * 3), most=2)


def test_unknown_fields_are_refused_or_left_out_as_the_server_is_set() -> None:
    with pytest.raises(InvalidRequest, match="best_guess is not a field"):
        completion(best_guess=1)
    assert parse_completion(b'{"prompt":"x","best_guess":1}', drop_unknown=True).prompt == "x"


@pytest.mark.parametrize("read", [parse_completion, parse_chat])
@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        (b'{"temperature": 1e400}', "temperature", "out of range"),
        (b'{"user": "x", "metadata": {"a": {"b": -1e999}}}', "metadata.a.b", "out of range"),
        (b'{"user": "\xff"}', "user", "cannot be decoded"),
        (b'{"user": ' + b"[" * 3000 + b"]" * 3000 + b"}", None, "nested too deeply"),
        (b'{"user": NaN}', None, "the body is not JSON"),
        (b"{", None, "the body is not JSON"),
    ],
)
def test_what_cannot_be_decoded_is_named_by_its_place(read: Any, body: bytes, param: str | None, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        read(body)
    assert caught.value.param == param


def test_a_missing_field_is_named() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(b"{}")
    assert caught.value.param == "messages"


def test_tools_are_for_the_template_only() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert chat(tools=tools, tool_choice="none").tools == tools
    with pytest.raises(InvalidRequest, match="no parser"):
        chat(tools=tools)


def test_an_error_keeps_its_kind_and_takes_the_callers_names() -> None:
    error = in_callers_words(
        ContextOverflow("the prompt has 9 tokens, maximum context length is 8", param="token_ids"), prompt="messages"
    )
    assert (type(error), error.param) == (ContextOverflow, "messages")

    busy = Conflict("sampling_params.seed token_ids[3]", param="sampling_params.seed", details={"a": 1})
    busy.retry_after_s = 2.0
    said = in_callers_words(busy, prompt="prompt")
    assert (said.message, said.param, said.details, said.retry_after_s) == ("seed prompt[3]", "seed", {"a": 1}, 2.0)


def test_a_field_that_only_sounds_like_the_prompt_keeps_its_name() -> None:
    error = InvalidRequest(
        "sampling_params.stop_token_ids[2]: not like token_ids[3]", param="sampling_params.stop_token_ids[2]"
    )

    said = in_callers_words(error, prompt="prompt")

    assert (said.message, said.param) == ("stop_token_ids[2]: not like prompt[3]", "stop_token_ids[2]")


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (chat(max_completion_tokens=3), {"max_tokens": "max_completion_tokens"}),
        (chat(max_completion_tokens=3, max_tokens=3), {}),
        (chat(logprobs=True, top_logprobs=1), {"logprobs": "top_logprobs"}),
        (completion(response_format={"type": "json_object"}), {"structured_outputs": "response_format"}),
        (completion(vllm_xargs={"a": 1}), {"extra_args": "vllm_xargs"}),
        (completion(vllm_xargs={"a": 1}, extra_args={"b": 1}), {}),
    ],
)
def test_an_error_has_the_name_under_which_the_field_was_sent(body: Any, names: dict[str, str]) -> None:
    assert own_names(body) == names
    for generates, callers in names.items():
        error = InvalidRequest(f"{generates} is odd, prompt_{generates} is not", param=generates)
        said = in_callers_words(error, prompt="prompt", names=own_names(body))
        assert (said.message, said.param) == (f"{callers} is odd, prompt_{generates} is not", callers)
