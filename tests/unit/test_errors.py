"""The error tree: whose fault, which status, whether to ask again, and the way over a wire and back."""

from typing import Any

import pytest

from rollplane import errors
from rollplane.errors import (
    MAX_MESSAGE_CHARS,
    CallerError,
    ContextOverflow,
    EngineDied,
    InvalidRequest,
    Overloaded,
    PeerError,
    RollplaneError,
    ServiceError,
    error_body,
    error_classes,
    error_from_body,
)

TREE = {
    "InvalidRequest": (400, CallerError, False),
    "ContextOverflow": (400, CallerError, False),
    "Unauthenticated": (401, CallerError, False),
    "Forbidden": (403, CallerError, False),
    "NotFound": (404, CallerError, False),
    "Conflict": (409, CallerError, False),
    "PreconditionFailed": (409, CallerError, False),
    "HeadTimeout": (408, CallerError, False),
    "HeadTooLarge": (431, CallerError, False),
    "PayloadTooLarge": (413, CallerError, False),
    "UnsupportedMedia": (415, CallerError, False),
    "IdempotencyMismatch": (422, CallerError, False),
    "Overloaded": (429, ServiceError, True),
    "Cancelled": (499, ServiceError, False),
    "EngineProtocolError": (502, PeerError, False),
    "EngineFailed": (502, PeerError, True),
    "TransportError": (502, PeerError, True),
    "Unavailable": (503, ServiceError, True),
    "EngineDied": (503, PeerError, True),
    "DeadlineExceeded": (504, ServiceError, False),
}


@pytest.mark.parametrize(("name", "facts"), TREE.items())
def test_each_error_says_whose_fault_it_is_and_whether_to_ask_again(name: str, facts: tuple[Any, ...]) -> None:
    status, fault, retryable = facts
    cls = getattr(errors, name)
    assert (cls.status, cls.retryable, issubclass(cls, fault)) == (status, retryable, True)
    assert name in (errors.__doc__ or "")


@pytest.mark.parametrize("name", TREE)
def test_every_error_crosses_a_wire_as_itself(name: str) -> None:
    sent = getattr(errors, name)("what happened", param="a.b", details={"have": [1]})
    back = error_from_body(error_body(sent))
    assert type(back) is type(sent)
    assert (back.message, back.param, back.details, back.retry_after_s) == (
        sent.message,
        sent.param,
        sent.details,
        sent.retry_after_s,
    )


def test_codes_are_one_to_one_but_for_the_three_bases() -> None:
    found = error_classes()
    assert {found[getattr(errors, name).code] for name in TREE} == {getattr(errors, name) for name in TREE}


@pytest.mark.parametrize(
    ("status", "name"),
    [
        (400, "InvalidRequest"),
        (401, "Unauthenticated"),
        (404, "NotFound"),
        (409, "Conflict"),
        (429, "Overloaded"),
        (502, "PeerError"),
        (503, "Unavailable"),
        (504, "DeadlineExceeded"),
        (500, "RollplaneError"),
        (418, "RollplaneError"),
        (None, "RollplaneError"),
    ],
)
@pytest.mark.parametrize("code", ["no_such_code", None, ["x"], 5])
def test_an_unknown_code_is_read_by_its_status(code: Any, status: int | None, name: str) -> None:
    error = error_from_body({"message": "m", "code": code}, status=status)
    assert type(error).__name__ == name


@pytest.mark.parametrize("hint", [True, "5", None, float("nan"), float("inf"), -1, [1]])
def test_a_retry_hint_that_is_no_time_is_not_taken(hint: Any) -> None:
    error = error_from_body({"code": "overloaded", "retry_after_s": hint})
    assert error.retry_after_s == Overloaded("x").retry_after_s


def test_a_foreign_body_still_makes_an_error() -> None:
    error = error_from_body({"message": ["x"], "param": 5, "details": "y"}, status=400)
    assert (type(error), error.message, error.param, error.details) == (InvalidRequest, "['x']", None, None)
    assert error_from_body({}).message == "no message"


def test_the_body_has_four_keys_always() -> None:
    assert error_body(InvalidRequest("m")) == {
        "message": "m",
        "type": "invalid_request_error",
        "param": None,
        "code": "invalid_request",
    }
    assert error_body(Overloaded("m", retry_after_s=2.5))["retry_after_s"] == 2.5
    assert error_body(EngineDied("m", details={"a": 1}))["details"] == {"a": 1}


def test_a_megabyte_in_a_message_is_cut() -> None:
    error = RollplaneError("x" * 1_000_000, param="y" * 1_000_000)
    assert len(error.message) == len(str(error)) == MAX_MESSAGE_CHARS
    assert error.param is not None
    assert len(error.param) == 256


def test_a_context_overflow_is_an_invalid_request() -> None:
    assert issubclass(ContextOverflow, InvalidRequest)
    assert ContextOverflow.code == "context_length_exceeded"
