"""Checks of a policy's life: pause, resume, weights, labels, caches, adapters."""

import asyncio
from typing import Any

from rollplane.engines.base import KvEventSource
from rollplane.errors import CallerError, NotFound, RollplaneError
from rollplane.protocol.kv_events import BlocksStored
from rollplane.protocol.request import GenerateRequest
from rollplane.protocol.response import GenerateResponse
from rollplane.testing.checks.subject import (
    QUIET_S,
    CheckFailed,
    MomentMissed,
    NotApplicable,
    Subject,
    Watch,
    must,
    refusal,
    same,
    same_answer,
    watching,
    within,
)
from rollplane.testing.requests import answer, make_request


def _long(subject: Subject, **asked: Any) -> GenerateRequest:
    return make_request(
        subject.prompt(), **{"seed": 8, "max_tokens": subject.long(), "ignore_eos": True, "stream": True, **asked}
    )


HOPS = 20
"""Turns of the event loop from a step to its reader, with room."""


async def _quiet(*watches: Watch) -> None:
    """Nothing arrives for a while."""
    await _handed_on()
    before = [len(watch.events) for watch in watches]
    await asyncio.wait([watch.task for watch in watches], timeout=QUIET_S)
    await _handed_on()
    after = [len(watch.events) for watch in watches]
    must(before == after, f"paused, yet events came: {before} became {after}")


async def _handed_on() -> None:
    """What an engine has made passes its queues; a process that did not run for a while wakes with its time over and nothing read."""
    for _ in range(HOPS):
        await asyncio.sleep(0)


async def _pause_running(subject: Subject, watch: Watch) -> int:
    """Pause (keep) while a stream runs, and let what was made arrive; tokens so far."""
    await watch.until_tokens(3)
    report = await within(subject.receiver().pause("keep"), "a pause")
    if watch.over or report.kept == 0:
        raise MomentMissed("the request was done before the pause")
    await _quiet(watch)
    return watch.tokens


async def paused_is_idle_and_resume_goes_on(subject: Subject) -> None:
    """pause(keep) returns with the engine idle; at resume a kept request goes on as if nothing had been."""
    receiver = subject.receiver()
    whole = await within(answer(subject.engine, _long(subject, stream=False)), "an answer")
    async with watching(subject.engine, _long(subject)) as (watch,):
        seen = await _pause_running(subject, watch)
        state = (await subject.engine.health()).state
        must(state == "paused", f"a paused engine says {state}")
        steps = (await subject.engine.health()).counters
        await _quiet(watch)
        must((await subject.engine.health()).counters == steps, "a paused engine's counters move")
        report = await receiver.resume()
        must(report.was_paused, "resume says it was not paused")
        got = await watch.answer()
        must(got.usage.completion_tokens > seen, "nothing was made after resume")
        same_answer(whole, got, "a request with and without a pause")


async def pause_and_resume_may_be_repeated(subject: Subject) -> None:
    """A second pause says so; a resume without a pause changes nothing."""
    receiver = subject.receiver()
    must(not (await receiver.resume()).was_paused, "resume of a running engine says it was paused")
    first, second = [await within(receiver.pause("keep"), "a pause") for _ in range(2)]
    must((first.already_paused, second.already_paused) == (False, True), f"two pauses say {first}, {second}")
    must((await receiver.resume()).was_paused, "resume of a paused engine says it was not")
    must(not (await receiver.resume()).was_paused, "a second resume says it was paused")
    must((await subject.engine.health()).state == "ready", "not ready after resume")


async def queued_while_paused_is_served_after(subject: Subject) -> None:
    """In every mode, a request that comes while paused waits and is served at resume; the pause stays idle."""
    receiver = subject.receiver()
    wanted = await within(answer(subject.engine, _long(subject, max_tokens=6)), "an answer")
    for mode in ("keep", "wait", "abort"):
        await within(receiver.pause(mode), f"a pause ({mode})")
        async with watching(subject.engine, _long(subject, max_tokens=6), _long(subject, max_tokens=6)) as watches:
            await _quiet(*watches)
            must(not any(w.over for w in watches), f"paused ({mode}), yet a request ended: {watches}")
            await receiver.resume()
            for watch in watches:
                same_answer(wanted, await watch.answer(), f"a request that waited through a pause ({mode})")


async def pause_wait_lets_running_requests_finish(subject: Subject) -> None:
    """pause(wait) returns when what ran is done, whole."""
    receiver = subject.receiver()
    async with watching(subject.engine, _long(subject, max_tokens=64)) as (watch,):
        await watch.until_tokens(1)
        await within(receiver.pause("wait"), "a pause (wait)")
        got = await watch.answer()
        must(got.choices[0].finish_reason == "length", f"a drained request ended with {got.choices[0].finish_reason}")
        health = await subject.engine.health()
        must(health.running == 0 and health.state == "paused", f"after a drain it says {health}")
        await receiver.resume()


async def pause_abort_ends_running_requests(subject: Subject) -> None:
    """pause(abort) ends what runs with reason `abort`, tokens kept."""
    receiver = subject.receiver()
    async with watching(subject.engine, _long(subject), _long(subject, logprobs=0)) as watches:
        for watch in watches:
            await watch.until_tokens(2)
        report = await within(receiver.pause("abort"), "a pause (abort)")
        for watch in watches:
            choice = (await watch.answer()).choices[0]
            if choice.finish_reason == "length" and report.aborted < 2:
                continue
            must(choice.finish_reason == "abort", f"pause(abort) ended a choice with {choice.finish_reason}")
            must(choice.token_ids.size >= 2, "tokens were lost in an abort")
        await receiver.resume()


async def a_stricter_pause_applies_to_what_is_left(subject: Subject) -> None:
    """pause(abort) while paused(keep) ends the kept requests."""
    receiver = subject.receiver()
    async with watching(subject.engine, _long(subject)) as (watch,):
        await _pause_running(subject, watch)
        report = await within(receiver.pause("abort"), "a pause (abort)")
        must(report.already_paused, "the second pause says it was the first")
        must((await watch.answer()).choices[0].finish_reason == "abort", "the kept request was not aborted")
    await receiver.resume()


async def aborts_work_while_paused(subject: Subject) -> None:
    """Kept and queued requests can be aborted during a pause; each ends at once, the kept one with its tokens."""
    receiver = subject.receiver()
    async with watching(subject.engine, _long(subject)) as (kept,):
        seen = await _pause_running(subject, kept)
        async with watching(subject.engine, _long(subject)) as (queued,):
            await _quiet(kept, queued)
            for watch, least in ((kept, seen), (queued, 0)):
                count = await subject.engine.abort(watch.request.request_id)
                must(count == 1, f"an abort during a pause counted {count}")
                choice = (await watch.answer()).choices[0]
                must(choice.finish_reason == "abort", f"ended with {choice.finish_reason}")
                must(choice.token_ids.size == least, f"{choice.token_ids.size} tokens, {least} were made")
    await receiver.resume()


async def spans_say_which_version_made_which_token(subject: Subject) -> None:
    """Through pause(keep), new weights and resume: `[[old, 0], [new, k]]`, k the tokens made before the pause.

    Tokens and routes from before stay those that were made then.
    """
    receiver, path = subject.receiver(), subject.checkpoint()
    options = {"routed_experts": subject.engine.info.capabilities.routed_experts}
    old = receiver.policy_version
    whole = await within(answer(subject.engine, _long(subject, options=options)), "an answer")
    async with watching(subject.engine, _long(subject, options=options)) as (watch,):
        staged = await within(receiver.stage_weights(path), "staging")
        seen = await _pause_running(subject, watch)
        await within(receiver.apply_weights(staged, version="check-v1"), "applying")
        must(receiver.policy_version == "check-v1", f"the version is {receiver.policy_version} after the update")
        await receiver.resume()
        got = (await watch.answer()).choices[0]
    spans = [(str(version), first) for version, first in got.policy_versions]
    must(spans == [(old, 0), ("check-v1", seen)], f"{seen} tokens before the update, spans {spans}")
    before, after = whole.choices[0], got
    same(before.token_ids[:seen], after.token_ids[:seen], "tokens from before the update")
    must(
        before.token_ids.tobytes() != after.token_ids.tobytes(),
        "the new weights made the same tokens as the old ones",
    )
    if before.routed_experts is not None and after.routed_experts is not None:
        rows = watch.request.prompt_tokens + seen - 1
        same(before.routed_experts.array[:rows], after.routed_experts.array[:rows], "routes from before the update")


async def an_update_changes_what_is_made(subject: Subject) -> None:
    """Staging changes nothing; applying does, for good, and only while paused; the same weights make the same tokens."""
    receiver, paths = subject.receiver(), [subject.checkpoint(0), subject.checkpoint(1)]
    before = await _greedy(subject)
    staged = [await within(receiver.stage_weights(path), "staging") for path in paths]
    must(staged[0].digest != staged[1].digest, "two checkpoints have one digest")
    same_answer(before, await _greedy(subject), "a request before and after staging")
    version = receiver.policy_version
    try:
        await within(receiver.apply_weights(staged[0], version="check-running"), "applying")
    except RollplaneError:
        pass
    else:
        raise CheckFailed("weights were applied while the engine was running")
    must(receiver.policy_version == version, "a refused update changed the version")
    made = []
    for i, path in enumerate((paths[0], paths[1], paths[0])):
        fresh = await within(receiver.stage_weights(path), "staging")
        await within(receiver.pause("wait", clear_cache=True), "a pause")
        await within(receiver.apply_weights(fresh, version=f"check-{i}"), "applying")
        await receiver.resume()
        made.append(await _greedy(subject))
        spans = [str(span[0]) for span in made[-1].choices[0].policy_versions]
        must(spans == [f"check-{i}"], f"a new request under check-{i} has the spans {spans}")
    same_answer(made[0], made[2], "one checkpoint applied twice")
    must(
        made[0].choices[0].token_ids.tobytes() != made[1].choices[0].token_ids.tobytes(),
        "two checkpoints make the same tokens",
    )


async def recomputed_rows_are_marked(subject: Subject) -> None:
    """pause(keep, clear_cache) makes kept requests compute their KV again, and the answer says which rows."""
    receiver = subject.receiver()
    async with watching(subject.engine, _long(subject)) as (watch,):
        await watch.until_tokens(3)
        report = await within(receiver.pause("keep", clear_cache=True), "a pause")
        if watch.over or not report.kept:
            raise MomentMissed("the request was done before the pause")
        must(report.cleared is not None, "the cache was to be cleared, the report does not say whether it was")
        await _quiet(watch)
        seen = watch.tokens
        await receiver.resume()
        got = await watch.answer()
    if not report.cleared:
        raise NotApplicable("it cannot clear the cache of kept requests, and says so")
    rows = watch.request.prompt_tokens + seen - 1
    marked = [tuple(pair) for pair in got.served_by.recomputed]
    must(marked == [(0, rows)], f"{rows} rows were computed again, the answer marks {marked}")


async def missing_checkpoints_are_not_found(subject: Subject) -> None:
    """A path that is not there is `NotFound`, and the engine goes on."""
    receiver = subject.receiver()
    try:
        await within(receiver.stage_weights("/nowhere/at/all"), "staging")
    except NotFound:
        pass
    except Exception as error:
        raise CheckFailed(f"a missing checkpoint is {error!r}, must be NotFound") from error
    else:
        raise CheckFailed("a missing checkpoint was staged")
    await _greedy(subject)


async def labels_touch_no_request(subject: Subject) -> None:
    """set_policy_version with requests in flight aborts none; tokens made afterwards carry the new label."""
    receiver = subject.receiver()
    old = receiver.policy_version
    async with watching(subject.engine, *[_long(subject, seed=i) for i in range(4)]) as watches:
        await watches[-1].until_tokens(2)
        await receiver.set_policy_version("check-label")
        must(receiver.policy_version == "check-label", "the label did not change")
        for watch in watches:
            choice = (await watch.answer()).choices[0]
            must(choice.finish_reason == "length", f"a label ended a request with {choice.finish_reason}")
            names = [str(span[0]) for span in choice.policy_versions]
            must(names in ([old], [old, "check-label"], ["check-label"]), f"the versions of a choice are {names}")
    await receiver.set_policy_version(old)


async def flushing_reports_what_it_did(subject: Subject) -> None:
    """An idle engine's caches go, and a repeated prompt is computed again; held ones stay, and the report says so."""
    receiver = subject.receiver()
    report = await within(receiver.flush_cache(), "a flush")
    must(report.reset, f"an idle engine could not flush: {report}")
    if subject.engine.info.block_tokens is None:
        return
    prompt = subject.prompt(subject.engine.info.block_tokens * 4 + 3)
    await _cached(subject, prompt)
    await within(receiver.flush_cache(), "a flush")
    cached = await _cached(subject, prompt)
    must(cached == 0, f"{cached} tokens are cached after a flush")
    request = make_request(prompt, max_tokens=subject.long(len(prompt)), ignore_eos=True, stream=True)
    async with watching(subject.engine, request) as (watch,):
        await watch.until_tokens(1)
        busy = await within(receiver.flush_cache(), "a flush")
        if not watch.over:
            must(not busy.reset and bool(busy.reason), f"a running request held blocks, the report says {busy}")


async def salts_separate_caches(subject: Subject) -> None:
    """One prompt under salts a, a, b has no, some, no cached tokens; salts do not change tokens."""
    size = subject.engine.info.block_tokens
    if size is None:
        raise NotApplicable("it has no prefix cache")
    prompt = subject.prompt(size * 3 + 5, variant=9)
    counts = [await _cached(subject, prompt, salt=salt) for salt in ("a", "a", "b")]
    must(counts[0] == 0 and (counts[1] or 0) >= size and counts[2] == 0, f"cached tokens under salts a, a, b: {counts}")


async def kv_events_tell_what_is_cached(subject: Subject) -> None:
    """First a snapshot, then changes; a new prompt's full blocks are stored, chained, with their tokens and salt."""
    size = subject.engine.info.block_tokens
    if size is None or not isinstance(subject.engine, KvEventSource):
        raise NotApplicable("it is not a KvEventSource")
    batches = subject.engine.kv_events()
    await within(anext(batches), "the snapshot")
    prompt = subject.prompt(size * 2 + 1, variant=11)
    await _cached(subject, prompt, salt="kv-check")
    told: list[int] = []
    last: int | None = None
    while len(told) < size * 2:
        for event in await within(anext(batches), "events of stored blocks"):
            if isinstance(event, BlocksStored) and event.salt == "kv-check":
                must(event.parent == last, f"blocks hang on {event.parent}, the ones before were {last}")
                must(event.block_tokens == size, f"blocks of {event.block_tokens} tokens, its info says {size}")
                told += event.token_ids.tolist()
                last = event.hashes[-1]
    must(told[: size * 2] == prompt[: size * 2], f"events tell of {told[: size * 2]}, the prompt was {prompt}")
    await batches.aclose()  # type: ignore[attr-defined]


async def adapters_load_serve_and_go(subject: Subject) -> None:
    """Each adapter changes the tokens, unloads, and may be unloaded again; a missing path is NotFound; base stays."""
    host = subject.adapter_host()
    base = await _greedy(subject)
    try:
        await within(host.load_adapter("check@0", "/nowhere/at/all"), "a load")
    except NotFound:
        pass
    else:
        raise CheckFailed("a missing adapter was loaded")
    names = [f"check@{i + 1}" for i in range(len(subject.adapters))]
    for name, path in zip(names, subject.adapters, strict=True):
        await within(host.load_adapter(name, path), "a load")
    must(set(names) <= set(await host.loaded_adapters()), f"loaded {names}, listed {await host.loaded_adapters()}")
    made = [base, *[await _greedy(subject, adapter=name) for name in names]]
    distinct = {a.choices[0].token_ids.tobytes() for a in made}
    must(len(distinct) == len(made), f"the base and {len(names)} adapters have {len(distinct)} distinct outputs")
    for name in [*names, *names]:
        await within(host.unload_adapter(name), "an unload")
    must(not set(names) & set(await host.loaded_adapters()), "an unloaded adapter is still listed")
    error = await refusal(subject.engine, make_request(subject.prompt(), fields={"adapter": names[0]}))
    must(isinstance(error, CallerError), f"a request for an unloaded adapter: {error!r}")
    same_answer(base, await _greedy(subject), "the base model before and after the adapters")


async def _greedy(subject: Subject, *, adapter: str | None = None) -> GenerateResponse:
    request = make_request(
        subject.prompt(10), temperature=0.0, max_tokens=16, ignore_eos=True, fields={"adapter": adapter}
    )
    return await within(answer(subject.engine, request), "an answer")


async def _cached(subject: Subject, prompt: list[int], *, salt: str | None = None) -> int:
    request = make_request(prompt, max_tokens=1, temperature=0.0, fields={"cache_salt": salt})
    count = (await within(answer(subject.engine, request), "an answer")).usage.cached_tokens
    if count is None:
        raise NotApplicable("its answers do not say how many tokens were cached")
    return count


CHECKS = (
    paused_is_idle_and_resume_goes_on,
    pause_and_resume_may_be_repeated,
    queued_while_paused_is_served_after,
    pause_wait_lets_running_requests_finish,
    pause_abort_ends_running_requests,
    a_stricter_pause_applies_to_what_is_left,
    aborts_work_while_paused,
    spans_say_which_version_made_which_token,
    an_update_changes_what_is_made,
    recomputed_rows_are_marked,
    missing_checkpoints_are_not_found,
    labels_touch_no_request,
    flushing_reports_what_it_did,
    salts_separate_caches,
    kv_events_tell_what_is_cached,
    adapters_load_serve_and_go,
)
