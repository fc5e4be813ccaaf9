"""The engines by name: an import path each, so that choosing one loads only that one."""

from importlib import import_module
from typing import Any, Final

from rollplane.errors import InvalidRequest

ENGINES: Final[dict[str, str]] = {
    "embedded": "rollplane.engines.embedded.engine:EmbeddedEngine",
    "mock": "rollplane.engines.mock.engine:MockEngine",
    "remote": "rollplane.engines.remote:RemoteEngine",
    "vllm": "rollplane.engines.vllm.inprocess:VllmEngine",
    "vllm-grpc": "rollplane.engines.grpc.engine:GrpcEngine",
}
"""Engine name -> `module:class`."""


def engine_class(name: str) -> type[Any]:
    """The class of an engine, imported now.

    Raises:
        InvalidRequest: no such engine, or a library it needs is not installed; the message names it.
    """
    target = ENGINES.get(name)
    if target is None:
        raise InvalidRequest(f"engine {name!r} is unknown; known: {', '.join(sorted(ENGINES))}", param="engine")
    module, _, attribute = target.partition(":")
    try:
        found: type[Any] = getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise InvalidRequest(
            f"the {name} engine needs the module {error.name!r}, which is not installed", param="engine"
        ) from error
    return found
