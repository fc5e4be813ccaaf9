"""Workers that are named once, in the settings."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from rollplane.discovery.urls import check_urls


class StaticDiscovery:
    """A fixed list of base URLs.

    Raises:
        InvalidRequest: an entry is no HTTP address, or stands there twice.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls = check_urls(list(urls), param="frontend.workers")

    def __repr__(self) -> str:
        return f"<StaticDiscovery {len(self.urls)} workers>"

    async def watch(self) -> AsyncGenerator[list[str], None]:
        """The list, once; then nothing more ever changes."""
        yield list(self.urls)
        await asyncio.Event().wait()
