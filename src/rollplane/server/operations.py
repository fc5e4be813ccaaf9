"""What became of an operation, asked for (`GET /v1/rl/operations/{id}`) or followed while it runs (`.../events`).

    id: 7
    event: worker
    data: {"number":7,"at_s":1764500000.1,"event":"worker","phase":"apply","worker":"http://...","seconds":0.8}

The kept events come at once, further ones as they happen; `data: [DONE]` follows once nothing of the operation runs. Who lost
the connection goes on with `Last-Event-ID` (or `after`). A quiet stream sends a comment now and then.
"""

import asyncio
import contextlib
from typing import Any, Final, Protocol, runtime_checkable

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Send

from rollplane.errors import InvalidRequest, NotFound
from rollplane.protocol.admin import LONGEST_EVENT_WAIT_S, OperationEvent
from rollplane.protocol.arrays import enc_hook
from rollplane.rl.operation_log import OperationLog, OperationLogs
from rollplane.server.error_responses import json_response
from rollplane.server.routes import ApiRoute, Doc
from rollplane.server.service import Service
from rollplane.server.watch import WatchedAnswer, run_watched

BEAT_S: Final = 10.0
MAX_WAIT_S: Final = LONGEST_EVENT_WAIT_S
MAX_NUMBER_DIGITS: Final = 15
DONE: Final = b"data: [DONE]\n\n"
_encoder = msgspec.json.Encoder(enc_hook=enc_hook)


class OperationReport(msgspec.Struct, frozen=True, kw_only=True):
    """By step: `running`, `done` or the sentence of its error."""

    operation_id: str
    steps: dict[str, str]


@runtime_checkable
class OperationKeeper(Protocol):
    """An administration that logs its operations."""

    @property
    def operation_logs(self) -> OperationLogs:
        """What happens in operations."""
        ...


async def operation_steps(request: Request) -> Response:
    """What became of an operation, by step.

    Raises:
        NotFound: nothing is known of it.
    """
    service: Service = request.app.state.service
    operation_id: str = request.path_params["operation_id"]
    logs = [log for kept in logs_of(service) if (log := kept.find(operation_id)) is not None]
    if not logs:
        raise _unknown(operation_id)
    steps = {str(step): said for log in logs for step, said in log.outcomes.items()}
    return json_response(OperationReport(operation_id=operation_id, steps=steps))


async def operation_events(request: Request) -> ASGIApp:
    """The events of an operation, until nothing of it runs.

    Raises:
        InvalidRequest: a number that is none. NotFound: it did not begin within `wait_s`.
    """
    service: Service = request.app.state.service
    operation_id: str = request.path_params["operation_id"]
    given = request.query_params.get("after", request.headers.get("last-event-id", "0"))
    if not (given.isascii() and given.isdigit() and len(given) <= MAX_NUMBER_DIGITS):
        raise InvalidRequest(f"after must be the number of an event, got {given[:32]!r}", param="after")
    wait_s = _wait_s(request.query_params.get("wait_s", "0"))
    log = find_log(service, operation_id)
    if log is None and wait_s > 0:
        log = await run_watched(_until_begun(service, operation_id, wait_s), request.receive)
    if log is None:
        raise _unknown(operation_id)
    return OperationStream(service, log, after=int(given))


def logs_of(service: Service) -> list[OperationLogs]:
    """Every log of operations behind this server."""
    admin: object = service.admin
    if isinstance(admin, OperationKeeper):
        return [admin.operation_logs]
    worker = service.worker
    keepers: list[Any] = [] if worker is None else [worker.policy, worker.adapter_table]
    return [keeper.operations.logs for keeper in keepers if keeper is not None]


def find_log(service: Service, operation_id: str) -> OperationLog | None:
    """The log of an operation, None where nothing is known of it."""
    return next((log for kept in logs_of(service) if (log := kept.find(operation_id)) is not None), None)


class OperationStream(WatchedAnswer):
    """The ASGI answer that follows one operation."""

    def __init__(self, service: Service, log: OperationLog, *, after: int) -> None:
        self._service = service
        self._log = log
        self._after = after

    def __repr__(self) -> str:
        return f"<OperationStream of {self._log!r} after {self._after}>"

    async def send_all(self, send: Send) -> None:
        """Send events until nothing runs, the reader leaves, or the process stops."""
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": [*headers, (b"x-accel-buffering", b"no")]})
        stopping = asyncio.ensure_future(self._service.lifecycle.stopping.wait())
        last = b""
        try:
            while not stopping.done():
                changed, running = self._log.changed, self._log.running
                events = self._log.since(self._after)
                if events:
                    self._after = events[-1].number
                    await self._write(send, b"".join(encode_event(event) for event in events))
                if not running:
                    last = DONE
                    break
                change = asyncio.ensure_future(changed.wait())
                try:
                    done, _ = await asyncio.wait(
                        {change, stopping}, timeout=BEAT_S, return_when=asyncio.FIRST_COMPLETED
                    )
                finally:
                    change.cancel()
                if not done:
                    await self._write(send, b": running\n\n")
        finally:
            stopping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await stopping
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _write(self, send: Send, body: bytes) -> None:
        async with asyncio.timeout(self._service.settings.write_stall_s):
            await send({"type": "http.response.body", "body": body, "more_body": True})


def encode_event(event: OperationEvent) -> bytes:
    """One server-sent event."""
    head = f"id: {event.number}\nevent: {event.event}\ndata: ".encode()
    return head + _encoder.encode(event) + b"\n\n"


async def _until_begun(service: Service, operation_id: str, wait_s: float) -> OperationLog | None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            while True:
                waits = [asyncio.ensure_future(kept.opened.wait()) for kept in logs_of(service)]
                log = find_log(service, operation_id)
                try:
                    if log is not None or not waits:
                        return log
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for wait in waits:
                        wait.cancel()
    return find_log(service, operation_id)


def _wait_s(text: str) -> float:
    try:
        wait_s = float(text)
    except ValueError:
        wait_s = -1.0
    if not 0 <= wait_s <= MAX_WAIT_S:
        raise InvalidRequest(f"wait_s must be in [0, {MAX_WAIT_S:g}] seconds, got {text[:32]!r}", param="wait_s")
    return wait_s


def _unknown(operation_id: str) -> NotFound:
    return NotFound(f"no operation {operation_id[:256]!r} is known", param="operation_id")


def operation_routes() -> list[ApiRoute]:
    """An operation's events and its steps; ids may have slashes in them."""
    return [
        ApiRoute(
            "/v1/rl/operations/{operation_id:path}/events",
            operation_events,
            methods=["GET"],
            access="admin",
            doc=Doc(
                summary="Follow an operation: its events, until nothing of it runs",
                tag="discovery",
                answer_type="text/event-stream",
                query={
                    "after": {"schema": {"type": "integer", "minimum": 0, "maximum": 10**MAX_NUMBER_DIGITS - 1}},
                    "wait_s": {"schema": {"type": "number", "minimum": 0, "maximum": MAX_WAIT_S}},
                },
                errors=(400, 404),
            ),
        ),
        ApiRoute(
            "/v1/rl/operations/{operation_id:path}",
            operation_steps,
            methods=["GET"],
            access="admin",
            doc=Doc(summary="What became of an operation", tag="discovery", answer=OperationReport, errors=(404,)),
        ),
    ]
