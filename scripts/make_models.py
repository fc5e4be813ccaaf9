"""Makes one tiny random model, or a LoRA adapter of one, in a directory.

    python scripts/make_models.py KIND OUT [--seed N] [--dtype float32|bfloat16]
    python scripts/make_models.py lora OUT --base DIR [--rank N] [--targets q_proj,v_proj]

KIND is one of qwen3, qwen3-moe, mixtral, qwen-vl, lora. Needs torch and transformers, takes seconds, downloads nothing.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.models import tiny
from transformers.utils.logging import disable_progress_bar


def main() -> None:
    """Reads the command line and prints the directory that was written."""
    parser = argparse.ArgumentParser(description="Make one tiny random model, or a LoRA adapter of one.")
    parser.add_argument("kind", choices=sorted(tiny.MAKERS))
    parser.add_argument("out", type=Path, help="the directory to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--base", type=Path, help="lora: the checkpoint that it adapts")
    parser.add_argument("--rank", type=int, help="lora: 8 unless given")
    parser.add_argument("--targets", help="lora: names of linear modules, separated by commas")
    arguments = parser.parse_args()

    options: dict[str, Any] = {"seed": arguments.seed, "dtype": arguments.dtype}
    lora = {"base": arguments.base, "rank": arguments.rank, "targets": arguments.targets}
    given = {name: value for name, value in lora.items() if value is not None}
    if arguments.kind == "lora":
        if arguments.base is None:
            parser.error("lora needs --base")
        options |= given
        if arguments.targets is not None:
            options["targets"] = tuple(arguments.targets.split(","))
    elif given:
        parser.error(f"--{next(iter(given))} is for lora only")
    disable_progress_bar()
    out = tiny.MAKERS[arguments.kind](arguments.out, **options)
    sys.stdout.write(f"{out}\n")


if __name__ == "__main__":
    main()
