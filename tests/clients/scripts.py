"""Scripts with others' clients, run in vLLM's environment: what one prints is what it found."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.real.processes import ROOT, VLLM_ENV, VLLM_SETTINGS

PYTHON = VLLM_ENV / "bin" / "python"


def trl(script: str, *words: str) -> Any:
    """What a script with TRL's clients found. Their package imports vLLM to see what it may ask, so they run beside it."""
    return found_by([Path(__file__).with_name(script), *words], PYTHONPATH=str(ROOT / ".venv-clients" / "trl"))


def found_by(words: list[str | Path], **environment: str) -> Any:
    """The JSON on the last line that Python, called with these words, prints."""
    assert PYTHON.exists(), "run scripts/make_vllm_env.sh"
    done = subprocess.run(
        [PYTHON, *words],
        env=os.environ | VLLM_SETTINGS | environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
