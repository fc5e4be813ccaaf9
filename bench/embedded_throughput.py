"""The embedded engine's step loop beside Transformers' own continuous batching, on one tiny mixture of experts.

Both get the same model, the same 32 prompts of 64 tokens and make 128 tokens for each. The rival returns tokens only,
which is its fastest way; its settings are swept and its best counts. Ours is measured bare and with everything a
trainer asks for: log-probabilities, sampling masks (top-p 0.95, top-k 50) and routed experts. Rounds alternate, so that
other load on the machine hits both; the ratio is taken within a round, and its median is what counts.

    python bench/embedded_throughput.py            # about two minutes on one core
    python bench/embedded_throughput.py --rounds 3 --quick
"""

import argparse
import itertools
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

sys.path.insert(0, str(Path(__file__).parents[1]))

from rollplane.engines.embedded.core import Core, CoreSettings
from rollplane.engines.embedded.model import load_model
from rollplane.engines.embedded.sampler import Controls
from rollplane.engines.embedded.sequence import Generation
from tests.models import tiny

REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 32, 64, 128
EVERYTHING: dict[str, Any] = {
    "controls": Controls(top_p=0.95, top_k=50),
    "logprobs": 1,
    "sampling_mask": True,
    "routed_experts": True,
}


def prompts(requests: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return rng.integers(7, tiny.VOCABULARY, (requests, PROMPT_TOKENS)).tolist()


def run_ours(core: Core, inputs: list[list[int]], tokens: int, **fields: Any) -> float:
    """Tokens per second."""
    requests = [
        Generation(
            request_id=str(i), prompt=np.array(p, np.int32), max_tokens=tokens, seed=i, ignore_eos=True, **fields
        )
        for i, p in enumerate(inputs)
    ]
    begin = time.perf_counter()
    for request in requests:
        core.submit(request)
    made = 0
    while not core.idle:
        made += sum(len(e.token_ids) for e in core.step())
    took = time.perf_counter() - begin
    if made != len(inputs) * tokens:
        raise RuntimeError(f"made {made} tokens")
    return made / took


class Rival:
    """Transformers' continuous batching manager with one choice of settings, started before the clock runs."""

    def __init__(self, model: Any, settings: dict[str, Any], tokens: int) -> None:
        settings = dict(settings)
        self.name = ", ".join(f"{k}={v}" for k, v in settings.items())
        self._tokens = tokens
        model.set_experts_implementation(settings.pop("experts"))
        model.set_attn_implementation(settings.pop("attention"))
        self._experts = model
        config = ContinuousBatchingConfig(auto_switch_to_flash=False, num_blocks=256, **settings)
        generation = GenerationConfig(
            max_new_tokens=tokens, do_sample=True, top_p=0.95, top_k=50, eos_token_id=-1, pad_token_id=0
        )
        self._context = model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=config, block=True, timeout=5
        )

    def __enter__(self) -> "Rival":
        self._manager = self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)

    def run(self, inputs: list[list[int]]) -> float:
        """Tokens per second."""
        begin = time.perf_counter()
        self._manager.add_requests(inputs=inputs, max_new_tokens=self._tokens)
        made, finished = 0, 0
        while finished < len(inputs):
            result = self._manager.get_result(timeout=5)
            if result is None:
                raise RuntimeError(f"the rival stopped: {self.name}")
            if result.is_finished():
                if result.error:
                    raise RuntimeError(f"{self.name}: {result.error}")
                finished += 1
                made += len(result.generated_tokens)
        took = time.perf_counter() - begin
        if made != len(inputs) * self._tokens:
            raise RuntimeError(f"the rival made {made} tokens: {self.name}")
        return made / took


def sweep(quick: bool) -> list[dict[str, Any]]:
    """The rival's settings that matter on a CPU."""
    grid: dict[str, list[Any]] = {
        "attention": ["sdpa", "paged|eager"],
        "experts": ["grouped_mm", "eager"],
        "page_size": [32, 256],
        "max_batch_tokens": [512, 2048],
        "allow_block_sharing": [False],
    }
    if quick:
        grid |= {"attention": ["sdpa"], "page_size": [256]}
    found = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    return [*found, {**found[0], "allow_block_sharing": True}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="fewer settings of the rival")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    inputs = prompts(REQUESTS)
    with tempfile.TemporaryDirectory() as directory:
        path = tiny.make_moe(Path(directory) / "moe", moe_intermediate_size=128)
        core = Core(load_model(path), CoreSettings(max_slots=REQUESTS))
        model = AutoModelForCausalLM.from_pretrained(path)
        print(
            f"{REQUESTS} requests x ({PROMPT_TOKENS} prompt + {OUTPUT_TOKENS} output), float32, {options.threads} thread(s), "
            f"torch {torch.__version__}, transformers {transformers.__version__}"
        )
        best: tuple[float, dict[str, Any]] = (0.0, {})
        print("the rival's settings, tokens/s (second run of each):")
        for settings in sweep(options.quick):
            with Rival(model, settings, OUTPUT_TOKENS) as rival:
                try:
                    rival.run(inputs)
                    speed = rival.run(inputs)
                except RuntimeError as error:
                    print(f"  failed  {error}")
                    continue
            print(f"  {speed:6.0f}  {rival.name}")
            best = max(best, (speed, settings), key=lambda pair: pair[0])
        bare, full, theirs = [], [], []
        with Rival(model, best[1], OUTPUT_TOKENS) as rival:
            rival.run(inputs)
            run_ours(core, inputs, OUTPUT_TOKENS)
            for _ in range(options.rounds):
                theirs.append(rival.run(inputs))
                bare.append(run_ours(core, inputs, OUTPUT_TOKENS, controls=Controls(top_p=0.95, top_k=50)))
                full.append(run_ours(core, inputs, OUTPUT_TOKENS, **EVERYTHING))
        ratio = statistics.median(f / t for f, t in zip(full, theirs, strict=True))
        print(f"best rival settings: {rival.name}")
        print(f"rival                            {statistics.median(theirs):6.0f} tokens/s")
        print(f"embedded, tokens only            {statistics.median(bare):6.0f} tokens/s")
        print(f"embedded, logprobs masks routes  {statistics.median(full):6.0f} tokens/s = {ratio:.1f} x the rival")


if __name__ == "__main__":
    main()
