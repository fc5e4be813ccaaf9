"""Connections to one vLLM server: a pool of HTTP/2 channels, the least busy one for each call."""

import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio

from rollplane.engines.grpc.long_answers import parse_answer
from rollplane.engines.grpc.services import CONTROL, INFERENCE, Stub
from rollplane.engines.grpc.settings import GrpcSettings
from rollplane.errors import InvalidRequest

Metadata = Sequence[tuple[str, str]]
_CALLS: Final = operator.attrgetter("calls")


class Lane:
    """One channel with its stubs; `calls` are running on it, one more while a block with it lasts."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.inference = Stub(channel, INFERENCE, parse=parse_answer)
        self.control = Stub(channel, CONTROL)
        self.calls = 0

    def __repr__(self) -> str:
        return f"<Lane {self.calls} calls>"

    def __enter__(self) -> "Lane":
        self.calls += 1
        return self

    def __exit__(self, *exc: object) -> None:
        self.calls -= 1


class ChannelPool:
    """`settings.channels` connections, each its own: gRPC would share one between equal channels otherwise.

    A request stays on one connection, and one connection carries many requests: for unary and streaming load alike,
    1 to 8 of them measured the same. Several matter where a server bounds the calls of one connection (often 100 to
    200), or where one large upload would hold up the rest.
    """

    def __init__(self, settings: GrpcSettings) -> None:
        self.settings = settings
        token = _read(settings.token_file, name="token_file")
        self._metadata: Metadata = ()
        if token is not None and not settings.tls:
            self._metadata = (("authorization", f"Bearer {token.decode().strip()}"),)
            token = None
        credentials = _credentials(settings, token)
        self._lanes = [Lane(_open(settings, credentials)) for _ in range(settings.channels)]

    def __repr__(self) -> str:
        return f"<ChannelPool {self.settings.endpoint} {[lane.calls for lane in self._lanes]}>"

    @property
    def control(self) -> Stub:
        """The control service."""
        return self._lanes[0].control

    @property
    def channel(self) -> grpc.aio.Channel:
        """A channel for other services."""
        return self._lanes[0].channel

    @property
    def lanes(self) -> list[Lane]:
        """Every connection."""
        return self._lanes

    def metadata(self, *more: tuple[str, str]) -> Metadata:
        """Metadata of a call: the token where it does not travel as call credentials, and `more`."""
        return (*self._metadata, *more)

    def lane(self) -> Lane:
        """The connection with the fewest calls; a block with it counts as one."""
        return min(self._lanes, key=_CALLS)

    async def close(self) -> None:
        """Close every connection; running calls end as cancelled."""
        for lane in self._lanes:
            await lane.channel.close()


def _open(settings: GrpcSettings, credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
    options: list[tuple[str, Any]] = [
        ("grpc.max_receive_message_length", settings.max_receive_bytes),
        ("grpc.max_send_message_length", settings.max_request_bytes),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.keepalive_time_ms", int(settings.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.enable_retries", 0),  # a repeat is the caller's decision: a request may have run
        ("grpc.enable_http_proxy", 0),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 2000),
    ]
    if settings.tls_server_name is not None:
        options.append(("grpc.ssl_target_name_override", settings.tls_server_name))
    if credentials is None:
        return grpc.aio.insecure_channel(settings.endpoint, options=options)
    return grpc.aio.secure_channel(settings.endpoint, credentials, options=options)


def _credentials(settings: GrpcSettings, token: bytes | None) -> grpc.ChannelCredentials | None:
    if not settings.tls:
        return None
    channel = grpc.ssl_channel_credentials(
        root_certificates=_read(settings.tls_ca_file, name="tls_ca_file"),
        private_key=_read(settings.tls_key_file, name="tls_key_file"),
        certificate_chain=_read(settings.tls_cert_file, name="tls_cert_file"),
    )
    if token is None:
        return channel
    return grpc.composite_channel_credentials(channel, grpc.access_token_call_credentials(token.decode().strip()))


def _read(path: str | None, *, name: str) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{name} {path!r} cannot be read: {error}", param=name) from None
