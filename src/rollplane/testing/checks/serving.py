"""Checks of serving: events, streams, aborts, hang-ups."""

import asyncio
from typing import Any

import numpy as np

from rollplane.protocol.events import ChoiceEvent, EndEvent, Event, PromptEvent
from rollplane.testing.checks.subject import (
    QUIET_S,
    CheckFailed,
    MomentMissed,
    Subject,
    must,
    same_answer,
    until_idle,
    watching,
    within,
)
from rollplane.testing.requests import answer, collect, make_request


async def events_come_in_order(subject: Subject) -> None:
    """`PromptEvent? ChoiceEvent* EndEvent`, and exactly one terminal event per choice, unary and streamed."""
    for stream in (False, True):
        request = make_request(subject.prompt(), n=2, seed=3, max_tokens=5, ignore_eos=True, logprobs=0, stream=stream)
        _check_order(await within(collect(subject.engine, request), "an answer"), choices=2)


async def unary_costs_one_event_per_choice(subject: Subject) -> None:
    """Without `stream`, every choice is one terminal event and no delta."""
    request = make_request(subject.prompt(), n=3, seed=3, max_tokens=6, ignore_eos=True)
    events = await within(collect(subject.engine, request), "an answer")
    found = sum(isinstance(e, ChoiceEvent) for e in events)
    must(found == 3, f"a unary request for 3 choices got {found} choice events")


async def streams_bring_deltas(subject: Subject) -> None:
    """With `stream`, tokens come before the choice ends."""
    request = make_request(subject.prompt(), seed=3, max_tokens=12, ignore_eos=True, stream=True)
    events = await within(collect(subject.engine, request), "a stream")
    deltas = [e for e in events if isinstance(e, ChoiceEvent) and e.finish_reason is None]
    must(bool(deltas), "a stream of 12 tokens brought no delta")


async def a_stream_folds_to_the_unary_answer(subject: Subject) -> None:
    """One seed gives one answer, however it is asked for; routes, masks and logprobs are byte-equal."""
    caps = subject.engine.info.capabilities
    extras: tuple[dict[str, Any], ...] = ({}, {"top_k": 4, "temperature": 0.8})
    for extra in extras:
        options = {"routed_experts": caps.routed_experts, "sampling_mask": caps.sampling_mask and bool(extra)}
        answers = [
            await within(
                answer(
                    subject.engine,
                    make_request(
                        subject.prompt(),
                        options=options,
                        stream=stream,
                        n=2,
                        seed=11,
                        max_tokens=16,
                        ignore_eos=True,
                        logprobs=2,
                        **extra,
                    ),
                ),
                "an answer",
            )
            for stream in (False, True)
        ]
        same_answer(answers[0], answers[1], "unary and streamed")


async def a_slow_reader_gets_the_same(subject: Subject) -> None:
    """A reader that is slower than the engine gets the same tokens, routes and masks."""
    asked: dict[str, Any] = {"seed": 5, "max_tokens": 24, "ignore_eos": True, "logprobs": 1}
    quick = await within(answer(subject.engine, make_request(subject.prompt(), **asked)), "an answer")
    request = make_request(subject.prompt(), stream=True, **asked)
    async with watching(subject.engine, request) as (watch,):
        await watch.until_tokens(2)
        slow = await watch.answer()
    same_answer(quick, slow, "a quick and a slow reader")


async def an_abort_keeps_what_there_is(subject: Subject) -> None:
    """`abort` ends a stream with reason `abort` and all tokens so far, answers 1, and then 0: it may be repeated."""
    request = make_request(
        subject.prompt(), seed=2, max_tokens=subject.long(), ignore_eos=True, logprobs=0, stream=True
    )
    async with watching(subject.engine, request) as (watch,):
        await watch.until_tokens(3)
        seen = watch.tokens
        counts = [await subject.engine.abort(request.request_id) for _ in range(2)]
        choice = (await watch.answer()).choices[0]
        must(choice.finish_reason == "abort", f"an aborted choice ended with {choice.finish_reason}")
        must(choice.token_ids.size >= seen, f"{seen} tokens were seen, the aborted answer has {choice.token_ids.size}")
        must(counts == [1, 0], f"two aborts of one request counted {counts}")
    must(await subject.engine.abort("nobody-has-this-id") == 0, "an abort of an unknown id counted something")


async def an_aborted_unary_request_keeps_its_tokens(subject: Subject) -> None:
    """Partial rollouts are worth keeping: a unary caller gets tokens and logprobs so far, as an answer."""
    prompts = [subject.prompt(variant=i) for i in range(2)]
    requests = [make_request(p, seed=2, max_tokens=subject.long(), ignore_eos=True, logprobs=0) for p in prompts]
    pace = make_request(subject.prompt(), seed=2, max_tokens=subject.long(), ignore_eos=True, stream=True)
    async with watching(subject.engine, *requests, pace) as watches:
        await watches[-1].until_tokens(4)
        counts = [await subject.engine.abort(r.request_id) for r in requests]
        answers = [await watch.answer() for watch in watches[:-1]]
    if not any(counts):
        raise MomentMissed("it was done before the abort could reach it")
    for count, got in zip(counts, answers, strict=True):
        choice = got.choices[0]
        wanted = "abort" if count else "length"
        must(choice.finish_reason == wanted, f"aborted {count}, but the choice ended with {choice.finish_reason}")
        must(
            choice.logprobs is not None and choice.logprobs.values.size == choice.token_ids.size,
            "an aborted answer has fewer logprobs than tokens",
        )


async def an_abort_before_the_first_token_is_whole(subject: Subject) -> None:
    """An empty answer still carries every side channel that was asked for, typed and empty."""
    caps = subject.engine.info.capabilities
    options = {"routed_experts": caps.routed_experts, "sampling_mask": False}
    request = make_request(
        subject.prompt(64), options=options, seed=2, max_tokens=subject.long(64), ignore_eos=True, logprobs=1
    )
    async with watching(subject.engine, request) as (watch,):
        await asyncio.sleep(0)  # the request is handed in, and nothing else has run
        count = await subject.engine.abort(request.request_id)
        choice = (await watch.answer()).choices[0]
    if not count:
        raise MomentMissed("it takes requests in later than the abort came")
    must(choice.finish_reason == "abort", f"an aborted choice ended with {choice.finish_reason}")
    must(choice.logprobs is not None, "an aborted answer lacks its logprobs object")
    if caps.routed_experts:
        routes, moe = choice.routed_experts, subject.engine.info.moe
        if routes is None or moe is None:
            raise CheckFailed("an aborted answer lacks the routed experts that were asked for")
        tokens = int(choice.token_ids.size)
        rows = 64 + tokens - 1 if tokens else 0
        shape = (rows, moe.layers, moe.top_k)
        must(routes.array.shape == shape, f"{tokens} tokens, routes {routes.array.shape}, must be {shape}")
        must(routes.array.dtype in (np.uint8, np.uint16, np.int32), f"routes are {routes.array.dtype}")


async def closing_the_iterator_stops_the_work(subject: Subject) -> None:
    """A reader that leaves costs nothing more: nothing runs, waits or moves afterwards."""
    request = make_request(subject.prompt(), max_tokens=subject.long(), ignore_eos=True, stream=True)
    events = subject.engine.generate(request)
    seen = 0
    async for event in events:
        seen += isinstance(event, ChoiceEvent)
        if seen == 2:
            break
    await events.aclose()  # type: ignore[attr-defined]
    await until_idle(subject.engine)
    must(await subject.engine.abort(request.request_id) == 0, "a request that was left is still known")


async def cancelling_the_reader_stops_the_work(subject: Subject) -> None:
    """A task that is cancelled while it waits for a unary answer leaves nothing behind, also when there are many."""
    requests = [
        make_request(subject.prompt(variant=i), max_tokens=subject.long(), ignore_eos=True, stream=i % 2 == 0)
        for i in range(12)
    ]
    async with watching(subject.engine, *requests) as watches:
        await watches[0].until_tokens(1)
        for watch in watches:
            await watch.leave()
        await until_idle(subject.engine)


async def a_long_request_does_not_block_a_short_one(subject: Subject) -> None:
    """A request that takes long, or hangs, is no reason for others to wait for its end."""
    long = make_request(subject.prompt(), max_tokens=subject.long(), ignore_eos=True, stream=True)
    async with watching(subject.engine, long) as (watch,):
        await watch.until_tokens(1)
        await within(answer(subject.engine, make_request(subject.prompt(variant=1), max_tokens=2)), "a short answer")
        if watch.over:
            raise MomentMissed("the long request was done before the short one")


async def a_paused_reader_blocks_nobody(subject: Subject) -> None:
    """A stream that nobody reads for a while does not stop the others."""
    events = subject.engine.generate(make_request(subject.prompt(), max_tokens=64, ignore_eos=True, stream=True))
    await within(anext(events), "a first event")
    short = make_request(subject.prompt(variant=1), max_tokens=4, ignore_eos=True)
    got = await within(answer(subject.engine, short), "an answer beside a stream that nobody reads")
    must(got.usage.completion_tokens == 4, "the other request lost tokens")
    await events.aclose()  # type: ignore[attr-defined]


async def health_tells_what_runs(subject: Subject) -> None:
    """Alive and ready; a running request shows; an idle engine shows none and is not stuck."""
    await until_idle(subject.engine)
    idle = await subject.engine.health()
    must(idle.alive and idle.state == "ready", f"an idle engine says {idle}")
    must(idle.last_progress_s == 0.0, f"an idle engine has not moved for {idle.last_progress_s} s")
    request = make_request(subject.prompt(), max_tokens=subject.long(), ignore_eos=True, stream=True)
    async with watching(subject.engine, request) as (watch,):
        await watch.until_tokens(1)
        busy = await within(subject.engine.health(), "the health of a busy engine", seconds=QUIET_S * 100)
        must(busy.running + busy.waiting >= 1 or watch.over, f"a busy engine says {busy}")


def _check_order(events: list[Event], *, choices: int) -> None:
    kinds = [type(e).__name__ for e in events]
    must(bool(events) and isinstance(events[-1], EndEvent), f"the last event is not the end: {kinds}")
    must(kinds.count("EndEvent") == 1, f"more than one end: {kinds}")
    prompts = [i for i, e in enumerate(events) if isinstance(e, PromptEvent)]
    must(prompts in ([], [0]), f"prompt events at {prompts}, may come once and first")
    for index in range(choices):
        own = [e for e in events if isinstance(e, ChoiceEvent) and e.index == index]
        terminal = [i for i, e in enumerate(own) if e.finish_reason is not None]
        must(
            terminal == [len(own) - 1],
            f"choice {index} has terminal events at {terminal} of {len(own)}, must be one and the last",
        )


CHECKS = (
    events_come_in_order,
    unary_costs_one_event_per_choice,
    streams_bring_deltas,
    a_stream_folds_to_the_unary_answer,
    a_slow_reader_gets_the_same,
    an_abort_keeps_what_there_is,
    an_aborted_unary_request_keeps_its_tokens,
    an_abort_before_the_first_token_is_whole,
    closing_the_iterator_stops_the_work,
    cancelling_the_reader_stops_the_work,
    a_long_request_does_not_block_a_short_one,
    a_paused_reader_blocks_nobody,
    health_tells_what_runs,
)
