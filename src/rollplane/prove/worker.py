"""One worker process for the length of a run."""

import sys
from pathlib import Path
from typing import Literal

from rollplane.demo.fleet import Fleet
from rollplane.prove.policy import CONTEXT_TOKENS

EngineName = Literal["embedded", "vllm"]
VLLM_ARGUMENTS = ("--enforce-eager", "--block-size", "32", "--skip-tokenizer-init", "--gpu-memory-utilization", "0.3")


class OneWorker(Fleet):
    """`rollplane worker` over a checkpoint; see `Fleet` for how it ends.

    Args:
        model: checkpoint directory; its name is the first policy version.
        engine: what serves it.
        dtype: of the engine's weights.
        root: directory that adapters may come from.
        adapters: whether adapters are served.
        context_tokens: of the longest sequence.
        python: the interpreter that runs it: vLLM may live in an environment of its own.
        log: file for what the process prints.
    """

    def __init__(
        self,
        model: Path,
        *,
        engine: EngineName,
        dtype: str,
        root: Path,
        log: Path,
        adapters: bool = False,
        context_tokens: int = CONTEXT_TOKENS,
        python: str = sys.executable,
    ) -> None:
        super().__init__(model, workers=1, dtype=dtype, slots=64, max_model_len=context_tokens, log=log)
        self.engine = engine
        self.root = root
        self.adapters = adapters
        self.python = python

    def __repr__(self) -> str:
        return f"<OneWorker {self.engine} {self.model.name}>"

    def command(self, ready: Path) -> list[str]:
        """What to execute; see `Fleet.command`."""
        options = {
            "--engine": self.engine,
            "--model": self.model,
            "--policy-version": self.model.name,
            "--dtype": self.dtype,
            "--max-num-seqs": self.slots,
            "--max-model-len": self.max_model_len,
            "--root": self.root,
            "--port": 0,
            "--ready-file": ready,
            "--drain-s": 2,
            "--log-level": "warning",
        }
        words = [str(word) for option in options.items() for word in option]
        own: list[str] = []
        if self.engine == "vllm":
            lora = ["--enable-lora", "--max-loras", "2", "--max-cpu-loras", "4", "--max-lora-rank", "8"]
            own = ["--", *VLLM_ARGUMENTS, *(lora if self.adapters else [])]
        else:
            words += ["--engine-option", "threads=1"]
        return [self.python, "-m", "rollplane.cli.main", "worker", "--stop-with-stdin", *words, *own]
