"""Every error of ours as an HTTP answer, and back."""

import json

import pytest

from rollplane.errors import RollplaneError, Unauthenticated, Unavailable, error_classes
from rollplane.protocol.http import error_from_answer
from rollplane.server.error_responses import as_rollplane_error, error_event, error_response


@pytest.mark.parametrize("kind", sorted(set(error_classes().values()), key=lambda k: k.__name__))
def test_an_error_survives_the_wire(kind: type[RollplaneError]) -> None:
    error = kind("a sentence", param="field.name", details={"limit": 3})
    response = error_response(error)
    found = error_from_answer(response.status_code, bytes(response.body), response.headers, url="u")

    assert response.status_code == kind.status
    assert type(found).status == kind.status
    assert (found.message, found.param, found.details) == ("a sentence", "field.name", {"limit": 3})
    assert found.retry_after_s == error.retry_after_s


def test_retry_after_is_whole_seconds_and_never_zero() -> None:
    assert error_response(Unavailable("m", retry_after_s=0.2)).headers["retry-after"] == "1"
    assert error_response(Unavailable("m", retry_after_s=2.1)).headers["retry-after"] == "3"
    assert "retry-after" not in error_response(RollplaneError("m")).headers


def test_a_missing_key_is_asked_for() -> None:
    assert error_response(Unauthenticated("m")).headers["www-authenticate"] == "Bearer"


def test_only_server_errors_that_asking_again_cannot_mend_say_so() -> None:
    for kind in set(error_classes().values()):
        says = error_response(kind("m")).headers.get("x-should-retry")
        assert says == ("false" if kind.status >= 500 and not kind.retryable else None)


def test_a_foreign_error_keeps_its_text_to_the_log() -> None:
    found = as_rollplane_error(ValueError("secret path"))

    assert found.status == 500
    assert "secret" not in found.message


def test_an_event_is_one_line() -> None:
    event = error_event(RollplaneError("two\nlines"))

    assert b"\n" not in event
    assert json.loads(event)["error"]["message"] == "two\nlines"
