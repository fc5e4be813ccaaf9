"""Rollplane: the rollout-serving plane of an RL post-training system.

Importing this package is cheap: everything below is loaded when it is first asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollplane.client.admin import AdminClient
    from rollplane.client.client import Client
    from rollplane.client.dynamo import DynamoClient

__all__ = ["AdminClient", "Client", "DynamoClient", "__version__"]

__version__: str

_EXPORTS = {
    "AdminClient": "rollplane.client.admin",
    "Client": "rollplane.client.client",
    "DynamoClient": "rollplane.client.dynamo",
}


def __getattr__(name: str) -> Any:
    """Load an exported name on first use.

    Raises:
        AttributeError: the package exports no such name.
    """
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("rollplane")
    elif name in _EXPORTS:
        from importlib import import_module

        value = getattr(import_module(_EXPORTS[name]), name)
    else:
        raise AttributeError(f"module 'rollplane' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
