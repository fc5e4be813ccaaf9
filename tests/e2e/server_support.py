"""An app of ours on a real socket in the test's own event loop, with a session to talk to it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from rollplane.config import ServerSettings
from rollplane.engines.base import Engine
from rollplane.server.app import create_app
from rollplane.server.auth import KeyRing
from rollplane.server.metrics import Metrics
from rollplane.server.ops import bind, make_server, url_of
from rollplane.server.service import Service
from rollplane.server.text import Texts
from rollplane.worker import Worker

GENERATE = "/inference/v1/generate"


@dataclass(frozen=True)
class Served:
    url: str
    service: Service
    session: aiohttp.ClientSession

    def post(self, path: str, body: Any = None, **options: Any) -> Any:
        return self.session.post(self.url + path, json=body, **options)

    def get(self, path: str, **options: Any) -> Any:
        return self.session.get(self.url + path, **options)

    async def generate(self, body: dict[str, Any], *, status: int = 200, **options: Any) -> dict[str, Any]:
        async with self.post(GENERATE, body, **options) as answer:
            content = await answer.read()
            assert answer.status == status, content
            return strict_json(content)

    async def chunks(self, body: dict[str, Any]) -> list[dict[str, Any] | str]:
        """Every `data:` of a stream, decoded; `[DONE]` as itself."""
        async with self.post(GENERATE, {**body, "stream": True}) as answer:
            assert answer.status == 200, await answer.read()
            assert answer.content_type == "text/event-stream"
            return data_of(await answer.read())

    async def metric(self, name: str) -> float:
        async with self.get("/metrics") as answer:
            text = await answer.text()
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))


def data_of(content: bytes) -> list[dict[str, Any] | str]:
    lines = [line.removeprefix(b"data: ") for line in content.split(b"\n") if line.startswith(b"data: ")]
    return ["[DONE]" if line == b"[DONE]" else strict_json(line) for line in lines]


def strict_json(content: bytes) -> Any:
    """msgspec refuses NaN and Infinity, as strict clients do."""
    return msgspec.json.decode(content)


@contextlib.asynccontextmanager
async def serving(
    engine: Engine,
    *,
    role: Any = "worker",
    keys: KeyRing | None = None,
    admin: Any = None,
    session_options: dict[str, Any] | None = None,
    sndbuf: int | None = None,
    tokenizer: Path | None = None,
    **settings: Any,
) -> AsyncIterator[Served]:
    """Serve an engine; a `Worker` is its own administration."""
    await engine.start()
    server_settings = ServerSettings(port=0, **settings)
    worker = engine if isinstance(engine, Worker) else None
    service = Service(
        role=role,
        engine=engine,
        admin=admin if admin is not None else worker,
        worker=worker,
        settings=server_settings,
        keys=keys or KeyRing(),
        metrics=Metrics(),
        texts=Texts(tokenizer),
    )
    sock = bind(server_settings)
    if sndbuf is not None:
        import socket

        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, sndbuf)
    server = make_server(create_app(service), server_settings)
    task = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        while not server.started:  # noqa: ASYNC110
            await asyncio.sleep(0)
        async with aiohttp.ClientSession(**(session_options or {})) as session:
            yield Served(url_of(sock), service, session)
    finally:
        service.lifecycle.stopping.set()
        server.should_exit = True
        await task
        await engine.close()
        service.pool.shutdown()


async def within(seconds: float, event: asyncio.Event) -> None:
    async with asyncio.timeout(seconds):
        await event.wait()


async def eventually(condition: Any, *, seconds: float = 10.0) -> None:
    """Until an async condition holds; for what only another process or socket can bring about."""
    async with asyncio.timeout(seconds):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def write_keys(tmp_path: Path, *, data: Sequence[str] = (), admin: Sequence[str] = ()) -> KeyRing:
    """A ring over two files."""
    files = {"data": tmp_path / "data.keys", "admin": tmp_path / "admin.keys"}
    files["data"].write_text("# data\n" + "\n".join(data))
    files["admin"].write_text("\n".join(admin))
    return KeyRing([files["data"]], [files["admin"]], reload_s=0.0)
