"""Importing Rollplane is cheap, and each heavy library is known only to the package that is about it."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rollplane

SRC = Path(rollplane.__file__).parent

HEAVY = ("torch", "transformers", "peft", "vllm", "grpc", "google.protobuf", "dynamo", "starlette", "uvicorn", "typer")

# Which modules may import what, at the top of a file or inside a function. A prefix stands for the whole package.
ALLOWED = {
    "torch": (
        "rollplane.client.replay_torch",
        "rollplane.client.weights",
        "rollplane.demo",
        "rollplane.engines.collective",
        "rollplane.engines.embedded",
        "rollplane.engines.tensors",
        "rollplane.engines.vllm",
        "rollplane.prove",
    ),
    "transformers": ("rollplane.engines.embedded", "rollplane.demo", "rollplane.prove", "rollplane.server.text"),
    "peft": ("rollplane.engines.embedded", "rollplane.demo"),
    "vllm": ("rollplane.engines.vllm",),
    "grpc": ("rollplane.engines.grpc", "rollplane.cli"),
    "google.protobuf": ("rollplane.engines.grpc",),
    "dynamo": ("rollplane.dynamo", "rollplane.discovery.dynamo"),
    "starlette": ("rollplane.server",),
    "uvicorn": ("rollplane.server", "rollplane.cli", "rollplane.testing"),
    "typer": ("rollplane.cli", "rollplane.demo", "rollplane.prove"),
}


def module_name(path: Path) -> str:
    parts = ["rollplane", *path.relative_to(SRC).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Full dotted names, so that `from google import protobuf` is seen as google.protobuf."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def heavy_roots(tree: ast.AST) -> set[str]:
    return {root for name in imported_names(tree) for root in HEAVY if name == root or name.startswith(f"{root}.")}


def is_within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def violations(module: str, source: str) -> list[str]:
    return [
        f"{module} imports {root}"
        for root in sorted(heavy_roots(ast.parse(source)))
        if not is_within(module, ALLOWED[root])
    ]


@pytest.mark.parametrize("statement", ["import rollplane", "import rollplane.client", "from rollplane import Client"])
def test_the_client_loads_no_heavy_library(statement: str) -> None:
    """In a fresh interpreter: this one may have loaded anything by now."""
    probe = f"import sys\n{statement}\nprint(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=50, check=False)

    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()).isdisjoint(HEAVY)


def test_the_version_is_the_distributions() -> None:
    from importlib.metadata import version

    assert rollplane.__version__ == version("rollplane")


def test_every_export_is_there() -> None:
    assert [name for name in rollplane.__all__ if getattr(rollplane, name, None) is None] == []


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Clientt'"):
        _ = rollplane.Clientt  # type: ignore[attr-defined]


def test_heavy_libraries_stay_in_their_packages() -> None:
    found = [line for path in sorted(SRC.rglob("*.py")) for line in violations(module_name(path), path.read_text())]

    assert found == []


@pytest.mark.parametrize(
    "source",
    ["import torch", "def f():\n    import torch.nn as nn", "from torch.nn import functional", "import sys, torch"],
)
def test_an_import_in_the_wrong_package_is_seen(source: str) -> None:
    assert violations("rollplane.router.router", source) == ["rollplane.router.router imports torch"]


def test_a_submodule_named_from_its_parent_is_seen() -> None:
    assert violations("rollplane.fold", "from google import protobuf") == ["rollplane.fold imports google.protobuf"]


def test_a_name_that_only_begins_alike_is_not_heavy() -> None:
    assert violations("rollplane.fold", "import torchlike\nfrom rollplane.engines import vllm") == []
