"""How the sidecar reaches its vLLM server and what it cannot learn from it."""

import ipaddress
from typing import Final
from urllib.parse import urlsplit

import msgspec

from rollplane.errors import InvalidRequest
from rollplane.protocol.events import LogprobsMode

MIB: Final = 2**20


class GrpcSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a `GrpcEngine`. Times in seconds, sizes in bytes.

    Reaching it:
        `endpoint`: HOST:PORT of `vllm.Inference` and `vllm.Control`. `http_endpoint`: base URL of the same server's HTTP
        side, asked for the world size where gRPC does not say it. `channels`: HTTP/2 connections that requests are
        spread over. `start_timeout_s`: longest wait for both services to be healthy. `call_timeout_s`: longest time of
        a request that brings no deadline. `control_timeout_s`: of a control call. `keepalive_s`: between two pings of
        an idle connection.
        `tls`, `tls_ca_file`, `tls_cert_file`, `tls_key_file`, `tls_server_name`: TLS, and our own certificate where the
        server asks for one. `token_file`: a bearer token, sent with every call; needs TLS or a loopback address.
        `max_receive_bytes`: largest answer. `max_request_bytes`: the server's own limit on requests.
    What the server does not say:
        `served_model_name`: names the model is served under here, the first is its main name; the server's own stay
        aliases. `model_path`: the model's directory as this machine sees it, where the server's name for it is none.
        `logprobs_mode`: which logprobs it was started with. `vocab_size`: rows of the input embedding, where the model's
        directory is not readable here. `max_logprobs`, `max_lora_rank`: as it was started; vLLM's defaults.
        `max_loras`: adapters loaded at once, of the slots that it says it has; None: all of them. One fewer for a server
        on a CPU, which gives requests for the base model the adapter of its last slot.
        `media_hosts`: hosts whose URLs it may fetch media from. `mm_device_do_normalize`: whether it normalises pixels
        itself; None: as vLLM 0.31 does for the model's architecture where it is not told otherwise.
        `allow_server_defaults`: serve although the model's generation config sets what the wire cannot override.
    """

    endpoint: str = "127.0.0.1:50051"
    http_endpoint: str | None = None
    channels: int = 4
    start_timeout_s: float = 300.0
    call_timeout_s: float = 86_400.0
    control_timeout_s: float = 60.0
    keepalive_s: float = 30.0
    tls: bool = False
    tls_ca_file: str | None = None
    tls_cert_file: str | None = None
    tls_key_file: str | None = None
    tls_server_name: str | None = None
    token_file: str | None = None
    max_receive_bytes: int = 100 * MIB
    max_request_bytes: int = 32 * MIB
    served_model_name: list[str] = msgspec.field(default_factory=list)
    model_path: str | None = None
    logprobs_mode: LogprobsMode = "unknown"
    vocab_size: int | None = None
    max_logprobs: int = 20
    max_lora_rank: int = 16
    max_loras: int | None = None
    media_hosts: tuple[str, ...] = ()
    mm_device_do_normalize: bool | None = None
    allow_server_defaults: bool = False

    def check(self) -> None:
        """Refuse settings that cannot work.

        Raises:
            InvalidRequest: naming the setting.
        """
        check_endpoint(self.endpoint)
        if self.http_endpoint is not None:
            check_base_url(self.http_endpoint)
        for name in ("channels", "max_receive_bytes", "max_request_bytes", "max_lora_rank"):
            if getattr(self, name) < 1:
                raise InvalidRequest(f"{name} must be >= 1, got {getattr(self, name)}", param=name)
        for name in ("start_timeout_s", "call_timeout_s", "control_timeout_s", "keepalive_s"):
            if not getattr(self, name) > 0:
                raise InvalidRequest(f"{name} must be > 0, got {getattr(self, name)}", param=name)
        if self.max_logprobs < 0:
            raise InvalidRequest(f"max_logprobs must be >= 0, got {self.max_logprobs}", param="max_logprobs")
        for name in ("vocab_size", "max_loras"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidRequest(f"{name} must be >= 1, got {value}", param=name)
        if (self.tls_cert_file is None) is not (self.tls_key_file is None):
            raise InvalidRequest("tls_cert_file and tls_key_file come together", param="tls_cert_file")
        for name in ("tls_ca_file", "tls_cert_file", "tls_server_name"):
            if getattr(self, name) is not None and not self.tls:
                raise InvalidRequest(f"{name} is set, but tls is off", param=name)
        if self.token_file is not None and not self.tls and not is_loopback(self.endpoint):
            raise InvalidRequest(
                f"token_file would send a secret to {self.endpoint} in the clear; turn tls on", param="token_file"
            )


def check_endpoint(endpoint: str) -> None:
    """Refuse what is not HOST:PORT.

    Raises:
        InvalidRequest: with the endpoint.
    """
    host, colon, port = endpoint.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port) <= 65_535) or "/" in endpoint:
        raise InvalidRequest(f"endpoint must be HOST:PORT, got {endpoint!r}", param="endpoint")


def check_base_url(url: str) -> None:
    """Refuse what is not a plain http(s) base URL; a path prefix is fine.

    Raises:
        InvalidRequest: another scheme, no host, a bad port, user info, a query or a fragment.
    """
    param = "http_endpoint"
    try:
        parts = urlsplit(url)
        port, host = parts.port, parts.hostname
    except ValueError as error:
        raise InvalidRequest(f"http_endpoint {url!r} is not a URL: {error}", param=param) from None
    if parts.scheme not in ("http", "https") or not host:
        raise InvalidRequest(f"http_endpoint must be http(s)://HOST[:PORT][/prefix], got {url!r}", param=param)
    if port == 0:
        raise InvalidRequest(f"http_endpoint {url!r} has the port 0", param=param)
    if parts.username is not None or parts.password is not None:
        raise InvalidRequest("http_endpoint must not hold a user name or password", param=param)
    if "?" in url or "#" in url:
        raise InvalidRequest(f"http_endpoint must have no query and no fragment, got {url!r}", param=param)


def is_loopback(endpoint: str) -> bool:
    """Whether HOST:PORT is this machine."""
    host = endpoint.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
