import grpc
import grpc.aio
import pytest

from rollplane.engines.grpc.status import error_from_control, error_from_rpc
from rollplane.errors import (
    Conflict,
    ContextOverflow,
    DeadlineExceeded,
    EngineDied,
    EngineFailed,
    Forbidden,
    InvalidRequest,
    NotFound,
    Overloaded,
    PayloadTooLarge,
    TransportError,
)

C = grpc.StatusCode


def failed(code: grpc.StatusCode, details: str = "words") -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)


@pytest.mark.parametrize(
    ("code", "details", "kind"),
    [
        (C.INVALID_ARGUMENT, "top_p is 2", InvalidRequest),
        (C.INVALID_ARGUMENT, "this model's maximum context length is 4096 tokens, but ...", ContextOverflow),
        (C.NOT_FOUND, "model", NotFound),
        (C.ALREADY_EXISTS, "adapter", Conflict),
        (C.FAILED_PRECONDITION, "sleep", Conflict),
        (C.OUT_OF_RANGE, "decoded message length too large", PayloadTooLarge),
        (C.RESOURCE_EXHAUSTED, "Sent message larger than max (5 vs. 4)", PayloadTooLarge),
        (C.RESOURCE_EXHAUSTED, "SERVER: Received message larger than max (5 vs. 4)", PayloadTooLarge),
        (C.RESOURCE_EXHAUSTED, "CLIENT: Received message larger than max (5 vs. 4)", TransportError),
        (C.RESOURCE_EXHAUSTED, "queue is full", Overloaded),
        (C.DEADLINE_EXCEEDED, "", DeadlineExceeded),
        (C.CANCELLED, "Timeout expired", DeadlineExceeded),
        (C.CANCELLED, "", TransportError),
        (C.UNAVAILABLE, "failed to connect", EngineDied),
        (C.INTERNAL, "engine", EngineFailed),
        (C.INTERNAL, "engine-core error: engine core reported fatal failure", EngineDied),
        (C.UNKNOWN, "", EngineFailed),
        (C.UNAUTHENTICATED, "token", EngineFailed),
        (C.UNIMPLEMENTED, "", EngineFailed),
    ],
)
def test_a_status_says_whose_fault_it_is(code, details, kind):
    error = error_from_rpc(failed(code, details), what="request r1")

    assert type(error) is kind
    assert error.message.startswith("request r1: ")
    assert details in error.message


def test_words_that_were_escaped_twice_are_read_as_words() -> None:
    error = error_from_rpc(failed(C.CANCELLED, "Timeout%20expired"), what="request r1")

    assert type(error) is DeadlineExceeded
    assert error.message == "request r1: Timeout expired"


def test_an_overflow_has_the_words_that_clients_look_for():
    error = error_from_rpc(failed(C.INVALID_ARGUMENT, "prompt exceeds max_model_len 10"), what="request r1")

    assert "maximum context length" in error.message


def test_a_control_call_that_is_refused_or_missing_is_the_callers():
    assert type(error_from_control(failed(C.PERMISSION_DENIED), what="LoadLora")) is Forbidden
    assert type(error_from_control(failed(C.UNIMPLEMENTED), what="Sleep")) is InvalidRequest
