"""Who may call what: bearer keys with a data or an admin scope, denied by default on every route.

A route declares its `access`; the middleware asks the same route table that serves the request, so an alias cannot be
forgotten, and a path that no route knows needs a key too. An admin key opens everything, a data key the data plane. `/health`,
`/liveness` and `/ready` are open: probes carry no keys, and their answers name no model, path or caller.

Without any key file the server is open and therefore bound to loopback; there it refuses requests that a web page in a
local browser could have made (a foreign Host or Origin).
"""

import functools
import hashlib
import hmac
import ipaddress
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import structlog
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from rollplane.config import read_keys
from rollplane.errors import Forbidden, InvalidRequest, NotFound, RollplaneError, Unauthenticated
from rollplane.server.peer import head_of

Access = Literal["open", "data", "admin"]
RELOAD_S = 1.0

log = structlog.get_logger("rollplane.auth")


class KeyRing:
    """The keys of a server, read again when a file changes.

    A file that disappears or becomes unreadable takes its keys with it: a revoked key must not live on.

    Args:
        data: files whose keys open the data plane.
        admin: files whose keys open everything.
        reload_s: least seconds between two looks at the files.

    Raises:
        InvalidRequest: at the start, a file cannot be read, or no file holds a key.
    """

    def __init__(
        self,
        data: Sequence[str | Path] = (),
        admin: Sequence[str | Path] = (),
        *,
        reload_s: float = RELOAD_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files: list[tuple[Path, Access]] = [(Path(p), "data") for p in data] + [(Path(p), "admin") for p in admin]
        self._reload_s = reload_s
        self._clock = clock
        self._seen: dict[Path, tuple[int, int, int] | None] = {}
        self._digests: dict[Path, list[bytes]] = {}
        self._looked_at = -reload_s
        for path, _ in self._files:
            self._digests[path] = [_digest(key) for key in read_keys(path)]
            self._seen[path] = _stamp(path)
        self._looked_at = clock()
        if self._files and not any(self._digests.values()):
            raise InvalidRequest(f"no key in {', '.join(str(path) for path, _ in self._files)}")

    def __repr__(self) -> str:
        if self.open:
            return "<KeyRing open>"
        counts = {
            want: sum(len(self._digests[p]) for p, has in self._files if has == want) for want in ("data", "admin")
        }
        return f"<KeyRing {counts['data']} data keys, {counts['admin']} admin keys>"

    @property
    def open(self) -> bool:
        """Whether no key files were configured: every caller may do everything."""
        return not self._files

    def scope_of(self, key: str) -> Literal["data", "admin"] | None:
        """The widest scope of a key, None for an unknown one. Takes the same time whichever key matches, or none."""
        self._reload()
        wanted = _digest(key)
        found: set[str] = set()
        for path, scope in self._files:
            for digest in self._digests[path]:
                if hmac.compare_digest(digest, wanted):
                    found.add(scope)
        return "admin" if "admin" in found else "data" if "data" in found else None

    def _reload(self) -> None:
        now = self._clock()
        if now - self._looked_at < self._reload_s:
            return
        self._looked_at = now
        for path, _ in self._files:
            stamp = _stamp(path)
            if stamp == self._seen[path]:
                continue
            self._seen[path] = stamp
            try:
                self._digests[path] = [_digest(key) for key in read_keys(path)]
                log.info("keys_read", file=str(path), keys=len(self._digests[path]))
            except InvalidRequest as error:
                self._digests[path] = []
                log.error("keys_dropped", file=str(path), reason=error.message)


class AuthMiddleware:
    """Lets a request through to a route only with the access that the route asks for.

    `admin_port`: routes of administration are not there on any other port.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: KeyRing,
        routes: Sequence[BaseRoute],
        refuse: "Refuse",
        admin_port: int | None = None,
    ) -> None:
        self._admin_port = admin_port
        self._app = app
        self._keys = keys
        self._routes = routes
        self._refuse = refuse
        # By path, for those without parameters: which route a path finds never changes.
        plain = [str(path) for route in routes if "{" not in (path := getattr(route, "path", "{"))]
        self._access = {path: required_access(_asking_for(path), routes) for path in plain}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Admit the request or answer 401 or 403."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            scope["rollplane.caller"] = self._admit(scope)
        except RollplaneError as error:
            await self._refuse(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _admit(self, scope: Scope) -> str:
        known = None if scope.get("root_path") else self._access.get(scope["path"])
        needs = known or required_access(scope, self._routes)
        headers = head_of(scope)
        # The socket's own port, which no header can say otherwise.
        if needs == "admin" and self._admin_port not in (None, (scope.get("server") or ("", None))[1]):
            raise NotFound("this route is served on the administration's own port")
        if self._keys.open:
            check_local(headers)
            return "local"
        if needs == "open":
            return "open"
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthenticated("this route needs a key: send `Authorization: Bearer <key>`")
        has = self._keys.scope_of(key.strip())
        if has is None:
            raise Unauthenticated("the bearer key is not known here")
        if needs == "admin" and has != "admin":
            raise Forbidden("this route needs a key with the admin scope; this key has the data scope")
        return f"{has}:{_digest(key.strip()).hex()[:8]}"


Refuse = Callable[[RollplaneError], ASGIApp]


def required_access(scope: Scope, routes: Sequence[BaseRoute]) -> Access:
    """The access that the route which will serve this request asks for; `data` where none will."""
    for route in routes:
        match, _ = route.matches(scope)
        if match is not Match.NONE:
            access: Access = getattr(route, "access", "admin")
            return access
    return "data"


def _asking_for(path: str) -> Scope:
    return {"type": "http", "method": "POST", "path": path, "root_path": "", "headers": []}


def check_local(headers: Mapping[str, str]) -> None:
    """Refuse what a web page could send to an open server on loopback.

    Raises:
        Forbidden: the Host or the Origin is not a loopback name (DNS rebinding, cross-site requests).
    """
    host = headers.get("host", "")
    if host and not is_loopback(_host_of(f"//{host}")):
        raise Forbidden("without keys this server answers to loopback names only; its Host header names another")
    origin = headers.get("origin")
    if origin is not None and not is_loopback(_host_of(origin)):
        raise Forbidden("without keys this server refuses requests of web pages from elsewhere")


def check_binding(host: str, keys: KeyRing) -> None:
    """Refuse to listen beyond loopback without keys.

    Raises:
        InvalidRequest: with the settings that would mend it.
    """
    if keys.open and not is_loopback(host):
        raise InvalidRequest(
            f"server.host is {host!r} and no keys are configured: without keys this server listens on loopback only; "
            "set server.admin_key_file (and server.data_key_file), or listen on 127.0.0.1",
            param="server.host",
        )


@functools.lru_cache(maxsize=256)
def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's own loopback."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@functools.lru_cache(maxsize=256)
def _host_of(url: str) -> str:
    """The host name in a URL; "" where there is none, or where it cannot be read (`//[::1`)."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
