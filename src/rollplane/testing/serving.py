"""An ASGI app on a real socket, in a thread: streams and hang-ups behave there as they do in production."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def serve_in_thread(app: Any, *, host: str = "127.0.0.1", start_timeout_s: float = 30.0) -> Iterator[str]:
    """Serve `app` (with its lifespan) on a free port; gives the base URL, `http://127.0.0.1:PORT`.

    The app runs on an event loop of its own: an engine inside it belongs to that loop. Leaving the block stops the
    server, and raises what it failed with.

    Raises:
        TimeoutError: it was not ready within `start_timeout_s` seconds.
    """
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    # Not at the top: whoever only checks an engine needs no web server.
    import uvicorn

    settled = threading.Event()

    class Server(uvicorn.Server):
        """Sets `settled` when it serves, or cannot."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            settled.set()

    server = Server(
        uvicorn.Config(app, log_level="warning", lifespan="on", timeout_graceful_shutdown=5, loop="asyncio")
    )
    failures: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(server.serve(sockets=[listener]))
        except BaseException as error:
            failures.append(error)
        finally:
            settled.set()

    thread = threading.Thread(target=run, name=f"serve:{port}", daemon=True)
    thread.start()
    try:
        if not settled.wait(start_timeout_s):
            raise TimeoutError(f"the app was not ready within {start_timeout_s:g} s")
        if not server.started:
            raise RuntimeError("the app did not start") from (failures[0] if failures else None)
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        thread.join(start_timeout_s)
        listener.close()
    if failures:
        raise RuntimeError("the server failed") from failures[0]
