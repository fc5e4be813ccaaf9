"""Checks of an engine's own weight transfer and sleep."""

from rollplane.engines.base import NativeControls
from rollplane.errors import RollplaneError, Unavailable
from rollplane.protocol.response import GenerateResponse
from rollplane.testing.checks.subject import (
    CheckFailed,
    NotApplicable,
    Subject,
    must,
    refusal,
    same_answer,
    watching,
    within,
)
from rollplane.testing.requests import answer, make_request


async def native_weights_take_effect(subject: Subject) -> None:
    """Parts change nothing until the finish, which names the version last; nothing cached before serves a request after.

    A kept request goes on and is marked; steps out of order, and a start while running, are refused and change nothing.
    """
    receiver, native = subject.receiver(), _controls(subject).native
    if native.backend is None:
        raise NotApplicable("it has no weight transfer of its own")
    if subject.transfer is None:
        raise NotApplicable("no parts were given for its weight transfer")
    join, parts = subject.transfer
    before = await _greedy(subject)
    version = receiver.policy_version
    await within(native.init(join), "joining")
    for early in (native.start(), native.update(parts[0]), native.finish("check-early")):
        try:
            await within(early, "a step out of order")
        except RollplaneError:
            continue
        raise CheckFailed("a step out of order was taken")
    same_answer(before, await _greedy(subject), "a request before and after steps out of order")
    request = make_request(
        subject.prompt(), seed=8, max_tokens=subject.long(), ignore_eos=True, stream=True, temperature=1.0
    )
    async with watching(subject.engine, request) as (watch,):
        await watch.until_tokens(3)
        await within(receiver.pause("keep"), "a pause")
        await within(native.start(), "the start")
        for part in parts:
            await within(native.update(part), "a part")
        must(receiver.policy_version == version, "the version changed before the finish")
        await within(native.finish("check-native"), "the finish")
        must(receiver.policy_version == "check-native", f"the version is {receiver.policy_version} after the finish")
        await receiver.resume()
        after = await _greedy(subject)
        kept = await watch.answer()
    spans = [str(span[0]) for span in after.choices[0].policy_versions]
    must(spans == ["check-native"], f"a new request has the spans {spans}")
    must(not after.usage.cached_tokens, f"{after.usage.cached_tokens} tokens of the old weights served a new request")
    must(
        after.choices[0].token_ids.tobytes() != before.choices[0].token_ids.tobytes(),
        "the new weights made the same tokens as the old ones",
    )
    spans = [str(span[0]) for span in kept.choices[0].policy_versions]
    must(spans in ([version, "check-native"], [version]), f"a kept request has the spans {spans}")


async def an_engine_asleep_refuses_until_it_is_awake(subject: Subject) -> None:
    """Asleep it is alive, says so and serves nothing; awake it is as it was, paused, with an empty cache."""
    receiver, sleeping = subject.receiver(), _controls(subject).sleeping
    if not sleeping.offered:
        raise NotApplicable("it has no sleep")
    before = await _greedy(subject)
    await within(receiver.pause("abort", clear_cache=True), "a pause")
    await within(sleeping.sleep(), "falling asleep")
    health = await subject.engine.health()
    must((health.alive, health.state) == (True, "asleep"), f"asleep, it says {health}")
    error = await refusal(subject.engine, make_request(subject.prompt(), max_tokens=1))
    must(isinstance(error, Unavailable), f"asleep, a request got {error!r}")
    await within(sleeping.wake_up(["weights"]), "waking up in part")
    must(sleeping.asleep, "awake with half of its memory")
    await within(sleeping.wake_up(), "waking up")
    must((await subject.engine.health()).state == "paused", "it was paused before it slept, and is not after it")
    await receiver.resume()
    after = await _greedy(subject)
    must(not after.usage.cached_tokens, f"{after.usage.cached_tokens} cached tokens survived a sleep")
    same_answer(before, after, "a request before and after a sleep")


def _controls(subject: Subject) -> NativeControls:
    engine: object = subject.engine
    if not isinstance(engine, NativeControls):
        raise NotApplicable("it has no transfer and no sleep of its own")
    return engine


async def _greedy(subject: Subject) -> GenerateResponse:
    request = make_request(subject.prompt(48), temperature=0.0, max_tokens=8, ignore_eos=True)
    return await within(answer(subject.engine, request), "an answer")


CHECKS = (native_weights_take_effect, an_engine_asleep_refuses_until_it_is_awake)
