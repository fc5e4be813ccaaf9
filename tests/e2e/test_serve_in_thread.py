"""The testing server is a real one: a socket, a lifespan, streams that arrive as they are sent, hang-ups that are seen."""

import asyncio
import threading
from typing import Any

import aiohttp
import pytest

from rollplane.testing import serve_in_thread


class App:
    """Streams one chunk, and then waits for the client to leave."""

    def __init__(self) -> None:
        self.lifespan: list[str] = []
        self.hung_up = threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            self.lifespan.append("up")
            await send({"type": "lifespan.startup.complete"})
            await receive()
            self.lifespan.append("down")
            await send({"type": "lifespan.shutdown.complete"})
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        self.hung_up.set()


async def test_streams_arrive_as_they_are_sent_and_hang_ups_are_seen() -> None:
    app = App()
    with serve_in_thread(app) as base_url:
        async with aiohttp.ClientSession() as session, session.get(f"{base_url}/anything") as response:
            assert await asyncio.wait_for(response.content.readany(), 10.0) == b"first"
            assert not app.hung_up.is_set()
        assert await asyncio.to_thread(app.hung_up.wait, 10.0)
    assert app.lifespan == ["up", "down"]


def test_an_app_that_cannot_start_is_an_error() -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "lifespan.startup.failed", "message": "no"})

    with pytest.raises(RuntimeError, match="the app did not start"), serve_in_thread(broken):
        pass
