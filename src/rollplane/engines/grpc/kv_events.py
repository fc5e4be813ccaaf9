"""Where a vLLM gRPC server tells what it caches: its KV event sources, followed into a mirror."""

from typing import Final

import structlog

from rollplane.engines.grpc.control import ControlCalls
from rollplane.engines.kv_mirror import KvMirror
from rollplane.engines.zmq_kv_events import ZmqKvEvents
from rollplane.errors import InvalidRequest, RollplaneError

log = structlog.get_logger("rollplane.engine")

_TRANSPORTS: Final = ("", "zmq")
_ENCODINGS: Final = ("", "msgpack")


async def follow_server(control: ControlCalls, mirror: KvMirror, *, server: str) -> ZmqKvEvents | None:
    """The server's events, not started; None where it tells none, or tells them in a way that is not read here.

    Args:
        server: HOST:PORT of the server, whose host stands for addresses that it binds on every interface.

    With several data-parallel ranks there are several caches behind one address, and no prefix is cached by "the worker":
    none of them is followed.
    """
    try:
        sources = await control.kv_event_sources()
    except RollplaneError as error:
        log.info("kv_events_unknown", server=server, error=error.message)  # an older server has no such call
        return None
    if len(sources) != 1:
        if sources:
            log.warning("kv_events_not_followed", server=server, why=f"{len(sources)} caches behind one server")
        return None
    source = sources[0]
    if source.transport.lower() not in _TRANSPORTS or source.encoding.lower() not in _ENCODINGS:
        log.warning("kv_events_not_followed", server=server, why=f"{source.transport}, {source.encoding}")
        return None
    host = server.rpartition(":")[0]
    try:
        return ZmqKvEvents(
            mirror,
            endpoint=_reached(source.endpoint, host),
            replay_endpoint=_reached(source.replay_endpoint, host) if source.replay_endpoint else None,
            topic=source.topic,
        )
    except InvalidRequest as error:
        log.warning("kv_events_not_followed", server=server, why=error.message)
        return None


def _reached(endpoint: str, host: str) -> str:
    """An address bound on every interface, as the server's own host is reached."""
    for everywhere in ("tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:"):
        if endpoint.startswith(everywhere):
            return f"tcp://{host}:{endpoint[len(everywhere) :]}"
    return endpoint
