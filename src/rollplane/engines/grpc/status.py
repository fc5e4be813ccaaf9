"""gRPC statuses as our errors: whose fault a failed call is."""

from typing import Final
from urllib.parse import unquote

import grpc

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
    RollplaneError,
    TransportError,
)

_CONTEXT_WORDS: Final = ("maximum context length", "max_model_len", "maximum model length", "context window")


def error_from_rpc(error: grpc.RpcError, *, what: str) -> RollplaneError:
    """The typed error of a failed call.

    Args:
        what: the call, for the message (`Generate of request r1`).

    UNAVAILABLE is an `EngineDied`; whoever can ask the server's health turns it into a `TransportError` where the
    server lives. A refused credential is ours to mend, not the caller's, and is an `EngineFailed`.
    """
    code, details = status_of(error)
    message = f"{what}: {details or code.name}"
    match code:
        case grpc.StatusCode.INVALID_ARGUMENT:
            overflow = any(words in details.lower() for words in _CONTEXT_WORDS)
            return ContextOverflow(f"{message} (maximum context length)") if overflow else InvalidRequest(message)
        case grpc.StatusCode.OUT_OF_RANGE:
            return PayloadTooLarge(message)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return _exhausted(message, details)
        case grpc.StatusCode.NOT_FOUND:
            return NotFound(message)
        case grpc.StatusCode.ALREADY_EXISTS | grpc.StatusCode.FAILED_PRECONDITION:
            return Conflict(message)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(message)
        case grpc.StatusCode.UNAVAILABLE:
            return EngineDied(message)
        case grpc.StatusCode.CANCELLED:
            # vllm-rs ends a call past its deadline so when its own timer is first.
            late = "timeout expired" in details.lower()
            return DeadlineExceeded(message) if late else TransportError(message)
    if "fatal failure" in details.lower():  # the server's frontend outlives its engine by a moment
        return EngineDied(message)
    return EngineFailed(f"{message} ({code.name})")


def error_from_control(error: grpc.RpcError, *, what: str) -> RollplaneError:
    """The typed error of a failed control call, where a refusal concerns the caller's path or name."""
    code, details = status_of(error)
    if code is grpc.StatusCode.PERMISSION_DENIED:
        return Forbidden(f"{what}: {details}")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return InvalidRequest(f"{what}: this vLLM server does not offer it ({details})")
    return error_from_rpc(error, what=what)


def status_of(error: grpc.RpcError) -> tuple[grpc.StatusCode, str]:
    """Code and words of a failed call."""
    code = error.code() if hasattr(error, "code") else grpc.StatusCode.UNKNOWN
    details = error.details() if hasattr(error, "details") else str(error)
    return code, unquote(details or "")  # vllm-rs escapes some of its words twice


def _exhausted(message: str, details: str) -> RollplaneError:
    words = details.lower()
    if "received message larger" in words and "server:" not in words:
        return TransportError(f"{message}: raise max_receive_bytes")
    if "larger than" in words or "too large" in words:
        return PayloadTooLarge(message)
    return Overloaded(message)
