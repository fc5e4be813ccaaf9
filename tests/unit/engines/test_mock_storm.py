"""Everything at once: requests, streams, hang-ups, aborts, pauses, updates and flushes in any order."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from rollplane.engines.mock.engine import MockEngine
from rollplane.engines.mock.settings import MockSettings
from rollplane.protocol.info import MoeShape
from rollplane.testing import Watch, make_request, settle


def a_request(dice: random.Random, i: int) -> Any:
    return make_request(
        [dice.randrange(200) for _ in range(dice.choice([1, 3, 16, 33, 64]))],
        request_id=f"r{i}",
        stream=dice.random() < 0.5,
        n=dice.choice([1, 1, 1, 3]),
        max_tokens=dice.choice([1, 2, 7, 40, 150]),
        top_k=dice.choice([1, 5, -1]),
        logprobs=dice.choice([None, 0, 2]),
        min_tokens=dice.choice([0, 1]),
        stop_token_ids=dice.choice([None, list(range(20))]),
        options={"sampling_mask": dice.random() < 0.5, "routed_experts": dice.random() < 0.7},
        fields={"priority": dice.choice([0, 0, 1]), "cache_salt": dice.choice([None, "a"])},
    )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("step_s", [0.0, 0.0002])
async def test_every_answer_that_is_read_to_its_end_keeps_the_contract(
    seed: int, step_s: float, tmp_path: Path
) -> None:
    dice = random.Random(seed)
    paths = []
    for i in range(3):
        path = tmp_path / f"w{i}"
        path.mkdir()
        (path / "mock_weights.json").write_text(f'{{"seed": {i}}}')
        paths.append(str(path))
    engine = MockEngine(
        MockSettings(
            moe=MoeShape(layers=2, top_k=2, num_experts=300),
            sampling_mask=True,
            vocab_tokens=211,
            max_num_seqs=6,
            cache_blocks=12,
            step_s=step_s,
            prefill_tokens_per_s=50_000.0 if step_s else None,
        )
    )
    await engine.start()
    watches: list[Watch] = []
    left: set[int] = set()
    for i in range(120):
        watches.append(Watch(engine, a_request(dice, i)))
        await settle(dice.randrange(6))
        match dice.randrange(14):
            case 0:
                await engine.abort(f"r{dice.randrange(i + 1)}")
            case 1:
                gone = dice.randrange(i + 1)
                if not watches[gone].over:
                    left.add(gone)
                    await watches[gone].leave()
            case 2:
                await engine.pause(dice.choice(["keep", "keep", "wait", "abort"]), clear_cache=dice.random() < 0.3)
                if dice.random() < 0.7:
                    await engine.apply_weights(await engine.stage_weights(dice.choice(paths)), version=f"v{i}")
                await settle(dice.randrange(6))
                await engine.resume()
            case 3:
                await engine.flush_cache(preempt=dice.random() < 0.5)
            case 4:
                await engine.set_policy_version(f"label{i}")
            case _:
                pass

    for i, watch in enumerate(watches):
        if i not in left:
            await asyncio.wait_for(watch.answer(), 20.0)

    health = await engine.health()
    assert (health.running, health.waiting, health.alive) == (0, 0, True)
    assert (await engine.flush_cache()).reset
    assert (await engine.health()).counters["cached_blocks"] == 0
    await engine.close()
