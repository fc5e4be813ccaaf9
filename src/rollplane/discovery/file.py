"""Workers that a file names, followed while it changes.

    {"workers": ["http://10.0.0.7:8100", "http://10.0.0.8:8100"]}      workers.json
    workers = ["http://10.0.0.7:8100", "http://10.0.0.8:8100"]         workers.toml

A file that is missing, half-written or wrong changes nothing: the last good list still holds, and the log says why.
"""

import asyncio
import logging
import tomllib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Final

import msgspec

from rollplane.discovery.urls import check_urls
from rollplane.errors import InvalidRequest, NotFound, RollplaneError

POLL_S: Final = 1.0
MAX_FILE_BYTES: Final = 1 << 20

log = logging.getLogger("rollplane.discovery")


class FileDiscovery:
    """The worker list in a JSON or TOML file (by its ending).

    Args:
        path: the file.
        poll_s: pause between two looks at its time of change and size.
    """

    def __init__(self, path: Path, *, poll_s: float = POLL_S) -> None:
        self.path = path
        self.trouble: str | None = None
        """Why the file as it is now is not followed; None where it is."""
        self._poll_s = poll_s
        self._urls: list[str] | None = None

    def __repr__(self) -> str:
        known = "nothing yet" if self._urls is None else f"{len(self._urls)} workers"
        return f"<FileDiscovery {self.path}: {known}{f', {self.trouble}' if self.trouble else ''}>"

    async def watch(self) -> AsyncGenerator[list[str], None]:
        """The list whenever the file has a new one that is good."""
        seen: tuple[int, int, int] | None = None
        while True:
            stamp = await asyncio.to_thread(self._stamp)
            if stamp != seen or stamp is None:
                seen = stamp
                urls = await asyncio.to_thread(self._look)
                if urls is not None and urls != self._urls:
                    self._urls = urls
                    yield list(urls)
            await asyncio.sleep(self._poll_s)

    def read(self) -> list[str]:
        """The list in the file now.

        Raises:
            NotFound: no such file. InvalidRequest: it cannot be read, or its entries are wrong.
        """
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            raise NotFound(f"there is no worker file {self.path}") from None
        except OSError as error:
            raise InvalidRequest(f"the worker file {self.path} cannot be read: {error}") from None
        if len(data) > MAX_FILE_BYTES:
            raise InvalidRequest(f"the worker file {self.path} has {len(data)} bytes, the limit is {MAX_FILE_BYTES}")
        try:
            tree = tomllib.loads(data.decode()) if self.path.suffix == ".toml" else msgspec.json.decode(data)
        except (tomllib.TOMLDecodeError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"the worker file {self.path} cannot be read: {error}") from None
        if not isinstance(tree, dict) or set(tree) != {"workers"}:
            raise InvalidRequest(f"the worker file {self.path} must be one table with `workers`, a list of URLs")
        return check_urls(tree["workers"], param="workers")

    def _look(self) -> list[str] | None:
        try:
            urls = self.read()
        except RollplaneError as error:
            if error.message != self.trouble:
                log.warning("the worker list stays as it was: %s", error.message)
            self.trouble = error.message
            return None
        self.trouble = None
        return urls

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino
