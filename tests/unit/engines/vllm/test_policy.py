"""Pause, flush and resume of one vLLM engine that come at the same time."""

import asyncio
from types import SimpleNamespace

import pytest
from tests.unit.engines.vllm.policies import policy_over

from rollplane.engines.vllm.live import LiveChoice
from rollplane.errors import EngineFailed


class FakeEngine:
    """Does as it is told, in order; a reset of running requests waits for `may_reset`. `errored`: it is gone."""

    errored = False

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.resetting = asyncio.Event()
        self.may_reset = asyncio.Event()
        self.may_resume = asyncio.Event()
        self.may_resume.set()
        self.resuming = asyncio.Event()
        self.refuses_to_pause = False

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.calls.append(f"pause {mode}")
        if self.refuses_to_pause:
            raise RuntimeError("no")

    async def resume_generation(self) -> None:
        self.calls.append("resume")
        self.resuming.set()
        await self.may_resume.wait()

    async def reset_mm_cache(self) -> None: ...

    async def reset_encoder_cache(self) -> None: ...

    async def reset_prefix_cache(self, *, reset_running_requests: bool) -> bool:
        if not reset_running_requests:
            return False  # something is held
        self.resetting.set()
        await self.may_reset.wait()
        self.calls.append("reset")
        return True


async def test_a_flush_stops_the_steps_and_lets_them_go_on() -> None:
    engine = FakeEngine()
    engine.may_reset.set()
    policy = policy_over(engine)

    assert (await policy.flush(preempt=True)).reset

    assert engine.calls == ["pause keep", "reset", "resume"]
    assert not policy.paused


async def test_a_pause_that_comes_during_a_flush_outlasts_it() -> None:
    engine = FakeEngine()
    policy = policy_over(engine)
    flushing = asyncio.create_task(policy.flush(preempt=True))
    await engine.resetting.wait()

    await policy.pause("keep")
    engine.may_reset.set()
    await flushing

    assert engine.calls == ["pause keep", "pause keep", "reset"]
    assert policy.paused


async def test_a_resume_waits_for_the_flush_that_is_under_way() -> None:
    engine = FakeEngine()
    policy = policy_over(engine)
    await policy.pause("keep")
    flushing = asyncio.create_task(policy.flush(preempt=True))
    await engine.resetting.wait()
    resuming = asyncio.create_task(policy.resume())
    await asyncio.sleep(0)
    engine.may_reset.set()

    await flushing
    assert (await resuming).was_paused

    assert engine.calls == ["pause keep", "reset", "resume"]
    assert not policy.paused


async def test_a_pause_that_comes_during_a_resume_holds() -> None:
    """vLLM hears of it after the resume, so it is paused whatever the resume says last."""
    engine = FakeEngine()
    policy = policy_over(engine)
    await policy.pause("keep")
    engine.may_resume.clear()
    resuming = asyncio.create_task(policy.resume())
    await engine.resuming.wait()

    await policy.pause("keep")
    engine.may_resume.set()
    await resuming

    assert policy.paused


async def test_a_pause_that_the_engine_refuses_pauses_nothing() -> None:
    engine = FakeEngine()
    engine.refuses_to_pause = True
    policy = policy_over(engine)

    with pytest.raises(EngineFailed, match="no"):
        await policy.pause("keep")

    assert not policy.paused
    engine.refuses_to_pause = False
    engine.may_reset.set()
    await policy.flush(preempt=True)
    assert not policy.paused


async def test_a_version_name_that_comes_back_needs_nobodys_blocks() -> None:
    """Kept requests hold blocks of the first v1; the second one has another salt, so they keep them."""
    engine = FakeEngine()
    policy = policy_over(engine)

    async def load() -> None: ...

    scopes = [policy.salt_scope]
    await policy.pause("keep")
    for version in ("v1", "v2", "v1"):
        await policy.change(version, load)
        scopes.append(policy.salt_scope)
    policy.relabel("v1")
    assert policy.salt_scope == scopes[-1]
    policy.relabel("v2")

    assert scopes == ["v0", "v1", "v2", "v1\x002"]
    assert policy.salt_scope == "v2\x002"
    assert engine.calls == ["pause keep"]


@pytest.mark.parametrize(("made_since", "resets"), [(0, 1), (1, 0)])
async def test_what_was_recomputed_under_weights_that_made_no_token_is_recomputed_again(
    made_since: int, resets: int
) -> None:
    """Weights change twice; only the first pause clears. No span would name the weights between."""
    engine, made = FakeEngine(), 5
    engine.may_reset.set()
    state = SimpleNamespace(detokenizer=SimpleNamespace(num_output_tokens=lambda: made))
    engine.output_processor = SimpleNamespace(request_states={"r": state})  # type: ignore[attr-defined]
    choice = LiveChoice(0, None, "v0")
    choice.collector = SimpleNamespace(request_id="r")
    live = SimpleNamespace(open_choices=[choice], prompt_tokens=3, recomputed_rows=0)
    policy = policy_over(engine, live=[live])

    async def load() -> None: ...

    await policy.pause("keep", clear_cache=True)
    await policy.change("v1", load)
    await policy.resume()
    made += made_since
    await policy.pause("keep")
    await policy.change("v2", load)
    await policy.resume()

    assert engine.calls.count("reset") == resets
    assert live.recomputed_rows == 3 + 5 - 1
    assert choice.spans.read(9) == [("v0", 0), *([("v1", 5)] if made_since else []), ("v2", made)]
