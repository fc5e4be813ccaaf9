"""Who is there: one small protocol for every source of worker addresses."""

from collections.abc import AsyncGenerator
from typing import Protocol, runtime_checkable


@runtime_checkable
class Discovery(Protocol):
    """A source of worker addresses."""

    def watch(self) -> AsyncGenerator[list[str], None]:
        """The base URLs of all workers: now, and again after every change. Each item replaces the one before.

        A source that fails for a while keeps quiet and goes on; what was said last still holds.
        """
        ...
