"""What vLLM says of a live request, as events: the prompt's, each choice's, and the last word."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from rollplane.engines.vllm import convert
from rollplane.engines.vllm.live import LiveChoice, LiveRequest
from rollplane.engines.vllm.media import placeholders_of
from rollplane.protocol.events import EndEvent, Event, LogprobsMode, PromptEvent, ServedBy


async def unary_events(live: LiveRequest, *, logprobs_mode: LogprobsMode) -> AsyncIterator[Event]:
    """The events of a request whose choices vLLM answers with one final output each.

    `logprobs_mode`: what the engine's log-probabilities are of, where the request does not sample greedily.
    """
    outputs: list[Any] = []
    for choice in live.choices:
        outputs.append(None if choice.ended else await choice.next_output())
        choice.ended = True
    yield _prompt_event(live, next((o for o in outputs if o is not None), None))
    for choice, output in zip(live.choices, outputs, strict=True):
        yield _ending(live, choice, output)
    yield _end_event(live, outputs, logprobs_mode=logprobs_mode)


async def stream_events(live: LiveRequest, *, logprobs_mode: LogprobsMode) -> AsyncIterator[Event]:
    """The events of a request whose choices vLLM answers with growing outputs, as they come."""
    last: list[Any] = []
    prompt_said = False
    async for choice, output in _outputs(live):
        if not prompt_said:
            yield _prompt_event(live, output)
            prompt_said = True
        if output.finished:
            last.append(output)
            yield _ending(live, choice, output)
            continue
        done = output.outputs[0]
        event, floored = convert.read_delta(done, live.plan, index=choice.index, sent=choice.sent)
        live.floored += floored
        if event is not None:
            choice.sent += int(event.token_ids.size)
            yield event
    if not prompt_said:
        yield _prompt_event(live, None)
    for choice in live.choices:
        if choice.collector is None:
            yield _ending(live, choice, None)
    yield _end_event(live, last, logprobs_mode=logprobs_mode)


async def _outputs(live: LiveRequest) -> AsyncIterator[tuple[LiveChoice, Any]]:
    """Every choice's outputs as they come, the last one of each with `finished` set."""
    tasks = {asyncio.ensure_future(choice.next_output()): choice for choice in live.open_choices}
    try:
        while tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                choice = tasks.pop(task)
                output = task.result()
                if output.finished:
                    choice.ended = True
                yield choice, output
                if not output.finished:
                    tasks[asyncio.ensure_future(choice.next_output())] = choice
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def _prompt_event(live: LiveRequest, output: Any) -> PromptEvent:
    request = live.request
    event = PromptEvent(prompt_tokens=live.prompt_tokens)
    if request.return_token_ids:
        event.prompt_token_ids = np.array(live.prompt["prompt_token_ids"], dtype=np.int32)
        event.mm_placeholders = placeholders_of(live.prompt)
    if output is None:
        return event
    if output.num_cached_tokens is not None and output.num_cached_tokens >= 0:
        event.cached_tokens = int(output.num_cached_tokens)
    if request.sampling.get("prompt_logprobs") is not None and output.prompt_logprobs is not None:
        event.prompt_logprobs, floored = convert.read_prompt_logprobs(
            output.prompt_logprobs, prompt_tokens=live.prompt_tokens
        )
        live.floored += floored
    event.prompt_token_id_logprobs = convert.read_fixed_scores(getattr(output, "prompt_token_id_logprobs", None))
    return event


def _ending(live: LiveRequest, choice: LiveChoice, output: Any) -> Event:
    if output is None:
        return convert.empty_ending(live.plan, index=choice.index, spans=choice.spans.read(0))
    done = output.outputs[0]
    event, floored = convert.read_ending(
        done,
        live.plan,
        index=choice.index,
        sent=choice.sent,
        spans=choice.spans.read(len(done.token_ids)),
    )
    live.floored += floored
    return event


def _end_event(live: LiveRequest, outputs: list[Any], *, logprobs_mode: LogprobsMode) -> EndEvent:
    given = [output for output in outputs if output is not None]
    greedy = live.request.sampling.get("temperature", 1.0) == 0
    end = EndEvent(
        served_by=ServedBy(
            logprobs_mode="greedy" if greedy and logprobs_mode == "sampling" else logprobs_mode,
            sampling_mask_mode="sampling" if live.plan.mask else None,
            floored_logprobs=live.floored,
            recomputed=[(0, live.recomputed_rows)] if live.recomputed_rows else [],
        )
    )
    if given:
        end.kv_transfer_params = next((o.kv_transfer_params for o in given if o.kv_transfer_params), None)
        end.ec_transfer_params = next((o.ec_transfer_params for o in given if o.ec_transfer_params), None)
        end.metrics = convert.read_timings(given[0].metrics)
    return end
