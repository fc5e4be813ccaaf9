"""Clients that nobody here wrote, unmodified, against servers of ours. Run with the Python of `scripts/make_clients_env.sh`.

The servers run from `.venv`, as processes: this environment has no Rollplane in it.
"""

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.real.processes import ROOT, VLLM_SETTINGS, running, wait_for_http

PYTHON = ROOT / ".venv" / "bin" / "python"
TOOL_TOKENS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "</think>"]
MODEL = "tiny"
PATIENCE_S = 300

# Clients look for `uv` and for certificates of proxies by themselves.
os.environ["PATH"] = f"{ROOT / '.venv-clients' / 'bin'}:{os.environ['PATH']}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/clients" in str(item.path):
            item.add_marker(pytest.mark.timeout(PATIENCE_S))


def model_directory(kind: str, **options: object) -> Path:
    """A tiny model, made by the environment that has torch."""
    words = f"from tests.models.tiny import shared_model; print(shared_model({kind!r}, **{options!r}))"
    done = subprocess.run(
        [PYTHON, "-c", words], capture_output=True, text=True, cwd=ROOT, check=True, timeout=PATIENCE_S
    )
    return Path(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="session")
def moe_model() -> Path:
    return model_directory("qwen3-moe", layers=2)


@contextlib.contextmanager
def worker(place: Path, *options: str, python: Path = PYTHON) -> Iterator[str]:
    """The base URL of a `rollplane worker` with these options."""
    ready, log = place / "ready.json", place / "worker.log"
    command = [str(python), "-m", "rollplane.cli.main", "worker", "--served-model-name", MODEL, "--port", "0"]
    command += ["--ready-file", str(ready), "--log-level", "warning", *options]
    with running(command, log, environment={**VLLM_SETTINGS, "OMP_NUM_THREADS": "1"}) as process:
        while not ready.exists():
            assert process.poll_s(0.1) is None, log.read_text()
        url: str = json.loads(ready.read_text())["url"]
        wait_for_http(f"{url}/health", process, log, timeout_s=PATIENCE_S)
        yield url


@pytest.fixture(scope="session")
def server(moe_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A worker over the embedded engine: routed experts, masks, weights and adapters from disk."""
    options = ["--engine", "embedded", "--model", str(moe_model), "--max-model-len", "1024", "--max-num-seqs", "8"]
    with worker(tmp_path_factory.mktemp("server"), *options, "--engine-option", "threads=1") as url:
        yield url


@pytest.fixture(scope="session")
def tool_tokenizer(moe_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's tokenizer with the tokens that typed Qwen3 renderers look for: ids that prompts without tools never have."""
    return with_tool_tokens(moe_model, tmp_path_factory.mktemp("tokenizer"))


def with_tool_tokens(model: Path, out: Path) -> Path:
    """The tokenizer of a model with `TOOL_TOKENS`, and its image processor's settings if it has some."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model))
    tokenizer.add_special_tokens({"additional_special_tokens": TOOL_TOKENS})
    tokenizer.save_pretrained(str(out))
    for name in ("preprocessor_config.json", "video_preprocessor_config.json", "config.json"):
        if (model / name).is_file():
            shutil.copy(model / name, out)
    return out


@pytest.fixture(scope="session")
def adapters(moe_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    words = (
        "import sys; from tests.models.tiny import make_lora\n"
        f"for i in range(2): make_lora(f'{root}/step_{{i}}', base={str(moe_model)!r}, seed=i)"
    )
    subprocess.run([PYTHON, "-c", words], cwd=ROOT, check=True, timeout=PATIENCE_S, capture_output=True)
    return [root / "step_0", root / "step_1"]
