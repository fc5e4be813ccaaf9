"""A chunk of a prompt is computed in the forward that makes the next token of the running requests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.models import tiny

from rollplane.engines.embedded import lora
from rollplane.engines.embedded.adapter_reader import read_contents
from rollplane.engines.embedded.model import CausalModel, load_model
from rollplane.engines.embedded.sequence import Generation

Make = Callable[..., Any]
Ask = Callable[..., Generation]


def forwards_of_each_step(runner: Any) -> tuple[list[int], list[bool]]:
    """Run to the end: the model's forwards in each step, and whether it had a prompt to compute."""
    calls: list[int] = []
    hook = runner.core.model.module.register_forward_pre_hook(lambda *_: calls.append(1))
    forwards, prefilled = [], []
    try:
        while not runner.core.idle:
            calls.clear()
            runner.steps(1)
            forwards.append(len(calls))
            prefilled.append(runner.core.prefilled)
    finally:
        hook.remove()
    return forwards, prefilled


@pytest.mark.parametrize("prompt_logprobs", [None, 1])
def test_a_prompt_costs_those_who_run_no_forward_of_its_own(
    prompt_logprobs: int | None, make_runner: Make, ask: Ask
) -> None:
    runner = make_runner(chunk_tokens=8).submit(ask("runs", 8, max_tokens=20)).steps(1)
    runner.submit(ask("long", 60, max_tokens=4, n=2, prompt_logprobs=prompt_logprobs), ask("next", 7, max_tokens=2))
    forwards, prefilled = forwards_of_each_step(runner)
    assert sum(prefilled) == 9  # 67 tokens, 8 at a time
    assert set(forwards) == {1}
    assert {key: len(found.tokens) for key, found in runner.done.items()} == {
        ("runs", 0): 20,
        ("long", 0): 4,
        ("long", 1): 4,
        ("next", 0): 2,
    }


def test_a_model_that_cannot_mix_them_computes_the_prompt_after_the_next_tokens(
    make_runner: Make, ask: Ask, make_other_moe: Callable[[str, Path], Path], tmp_path: Path
) -> None:
    model = load_model(make_other_moe("qwen2_moe", tmp_path / "m"))
    requests = [ask("runs", 8, max_tokens=12, logprobs=0), ask("long", 40, max_tokens=4, logprobs=0)]
    runner = make_runner(model, chunk_tokens=8).submit(requests[0]).steps(1).submit(requests[1])
    forwards, prefilled = forwards_of_each_step(runner)
    assert forwards == [2 if prompt else 1 for prompt in prefilled]
    assert sum(prefilled) == 5
    for request in requests:
        alone = make_runner(model).submit(request).only()
        assert runner.done[request.request_id, 0].tokens == alone.tokens
        assert np.allclose(runner.done[request.request_id, 0].logprobs, alone.logprobs, atol=1e-5)


@pytest.mark.parametrize("stacked_rows", [lora.STACKED_ROWS, 4])
def test_adapters_of_prompts_and_of_those_who_run_do_not_mix(
    stacked_rows: int,
    make_runner: Make,
    ask: Ask,
    dense_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where an adapter changes the head, which gets the rows that need logits only if none does."""
    monkeypatch.setattr(lora, "STACKED_ROWS", stacked_rows)
    model: CausalModel = load_model(dense_dir)
    targets = {"body": ("q_proj", "v_proj", "down_proj"), "head": ("o_proj", "lm_head")}
    paths = {
        name: tiny.make_lora(tmp_path / name, base=dense_dir, seed=i, targets=of)
        for i, (name, of) in enumerate(targets.items())
    }

    def adapted(**settings: Any) -> Any:
        runner = make_runner(model, **settings)
        for name, path in paths.items():
            for _ in runner.core.load_adapter(name, read_contents(path)):
                pass
        return runner

    requests = [
        ask(f"r{i}", 6 + 9 * i, adapter=name, max_tokens=9, logprobs=0, prompt_logprobs=1 if i == 4 else None)
        for i, name in enumerate(["body", "head", None] * 2)
    ]
    together = adapted(max_slots=6, chunk_tokens=8).submit(*requests).finish()
    for request in requests:
        alone = adapted().submit(request).only()
        found = together[request.request_id, 0]
        assert found.tokens == alone.tokens
        assert np.allclose(found.logprobs, alone.logprobs, atol=1e-5)
    of_prompt, alone = together["r4", 0].prompt_logprobs, adapted().submit(requests[4]).only().prompt_logprobs
    assert np.allclose(of_prompt.values, alone.values, atol=2e-5)
