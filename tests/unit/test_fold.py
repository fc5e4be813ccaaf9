"""Folding: any cut of an answer into deltas folds to the same answer; an event out of order is a breach."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.protocol.answers import float32, int32, responses

from rollplane.errors import EngineProtocolError
from rollplane.fold import Fold, FoldPlan, check_again, concat_ids, concat_logprobs
from rollplane.protocol.artifacts import Alternatives, PromptLogprobs, RoutedExperts, SamplingMask, TokenLogprobs
from rollplane.protocol.events import ChoiceEvent, EndEvent, ErrorEvent, PromptEvent, ServedBy
from rollplane.protocol.response import GenerateResponse


def plan_of(response: GenerateResponse) -> FoldPlan:
    first = response.choices[0]
    return FoldPlan(
        request_id=response.request_id,
        model=response.model,
        choices=len(response.choices),
        prompt_tokens=response.usage.prompt_tokens,
        logprobs=first.logprobs is not None,
        routes=first.routed_experts is not None,
        mask=first.sampling_mask is not None,
        prompt_logprobs=response.prompt_logprobs is not None,
        routes_start=None if first.routed_experts is None else first.routed_experts.start,
    )


def part(logprobs: TokenLogprobs | None, a: int, b: int) -> TokenLogprobs | None:
    """Tokens a..b of the logprobs, taken row by row."""
    if logprobs is None:
        return None
    top = logprobs.alternatives
    cut = None
    if top is not None:
        rows = [range(top.offsets[t], top.offsets[t + 1]) for t in range(a, b)]
        flat = [j for row in rows for j in row]
        cut = Alternatives(
            ids=int32([top.ids[j] for j in flat]),
            values=float32([top.values[j] for j in flat]),
            ranks=int32([top.ranks[j] for j in flat]),
            offsets=int32(np.cumsum([0, *map(len, rows)])),
        )
    ranks = None if logprobs.ranks is None else logprobs.ranks[a:b]
    return TokenLogprobs(values=logprobs.values[a:b], ranks=ranks, alternatives=cut)


@st.composite
def cut_events(draw: Any) -> tuple[GenerateResponse, list[Any]]:
    """An answer, and one of its many streams: random cuts, choices interleaved, the terminal with or without tokens."""
    response = draw(responses())
    lanes: list[list[ChoiceEvent]] = []
    for c in response.choices:
        tokens = int(c.token_ids.size)
        cuts = sorted(draw(st.lists(st.integers(0, tokens), max_size=4)))
        lane = []
        for a, b in zip([0, *cuts], [*cuts, tokens], strict=True):
            lane.append(ChoiceEvent(index=c.index, token_ids=c.token_ids[a:b], logprobs=part(c.logprobs, a, b)))
        last = lane[-1]
        last.finish_reason, last.stop_reason, last.policy_versions = c.finish_reason, c.stop_reason, c.policy_versions
        last.routed_experts, last.sampling_mask = c.routed_experts, c.sampling_mask
        lanes.append(lane)
    order = draw(st.permutations([i for i, lane in enumerate(lanes) for _ in lane]))
    prompt = PromptEvent(
        prompt_tokens=response.usage.prompt_tokens,
        cached_tokens=response.usage.cached_tokens,
        prompt_token_ids=response.prompt_token_ids,
        prompt_logprobs=response.prompt_logprobs,
    )
    end = EndEvent(
        served_by=response.served_by, kv_transfer_params=response.kv_transfer_params, metrics=response.metrics
    )
    return response, [prompt, *(lanes[i].pop(0) for i in order), end]


@settings(max_examples=200, deadline=None)
@given(cut_events())
def test_any_cut_folds_to_the_whole_answer(case: tuple[GenerateResponse, list[Any]]) -> None:
    response, events = case
    fold = Fold(plan_of(response))
    ended = [choice for event in events if (choice := fold.add(event)) is not None]
    folded = fold.response(created=response.created)
    assert repr(folded) == repr(response)
    assert sorted(choice.index for choice in ended) == list(range(len(response.choices)))
    assert fold.completion_tokens == response.usage.completion_tokens
    check_again(folded, plan_of(response))


def test_one_terminal_event_is_folded_without_a_copy() -> None:
    ids, values = int32([1, 2]), float32([-1, -2])
    fold = Fold(plan(logprobs=True))
    choice = fold.add(done(token_ids=ids, logprobs=TokenLogprobs(values=values)))
    assert choice is not None
    assert choice.logprobs is not None
    assert choice.token_ids is ids
    assert choice.logprobs.values is values


def plan(**changes: Any) -> FoldPlan:
    fields: dict[str, Any] = {"request_id": "r", "model": "m", "choices": 1, "prompt_tokens": 3, "logprobs": False}
    return FoldPlan(**(fields | changes))


def done(**changes: Any) -> ChoiceEvent:
    return ChoiceEvent(**({"index": 0, "token_ids": int32([5]), "finish_reason": "stop"} | changes))


def delta(**changes: Any) -> ChoiceEvent:
    return ChoiceEvent(**({"index": 0, "token_ids": int32([5])} | changes))


ROUTES = RoutedExperts(array=np.tile(np.array([[1, 0]], np.uint8), (3, 1, 1)))
MASK = SamplingMask(ids=int32([5]), offsets=int32([0, 1]))
LOGPROBS = TokenLogprobs(values=float32([-1]))
PROMPT = PromptEvent(prompt_tokens=3)
LONG = TokenLogprobs(values=float32([-1, -1]))
BREACHES: list[tuple[str, dict[str, Any], list[Any], str]] = [
    ("an event after the end", {}, [done(), EndEvent(), done()], "ChoiceEvent after the end of request r"),
    ("two ends", {}, [done(), EndEvent(), EndEvent()], "EndEvent after the end"),
    ("two prompts", {}, [PROMPT, PROMPT], "the prompt was announced twice"),
    ("a late prompt", {"choices": 2}, [done(), PROMPT], r"announced after the choices \[0\] ended"),
    ("another prompt length", {}, [PromptEvent(prompt_tokens=4)], "prompt has 3 tokens, the engine says 4"),
    ("other prompt ids", {}, [PromptEvent(prompt_tokens=3, prompt_token_ids=int32([1]))], "1 ids, the prompt 3"),
    ("a prompt of less than nothing", {"prompt_tokens": None}, [PromptEvent(prompt_tokens=-5)], "prompt has -5 tokens"),
    ("less than nothing cached", {}, [PromptEvent(prompt_tokens=3, cached_tokens=-1)], "has 3 tokens, -1 of them cached"),
    ("less than nothing floored", {}, [done(), EndEvent(served_by=ServedBy(floored_logprobs=-1))], "floored -1 logprobs"),
    ("a missing terminal", {"choices": 3}, [done(index=1), EndEvent()], r"terminal event for the choices \[0, 2\]"),
    ("no such choice", {}, [done(index=1)], "choice 1 of a request for 1"),
    ("a negative choice", {}, [done(index=-1)], "choice -1 of a request for 1"),
    ("a choice twice", {"choices": 2}, [done(), done()], "choice 0 has an event after its terminal one"),
    ("a delta after a terminal", {"choices": 2}, [done(), delta()], "after its terminal one"),
    ("more logprobs than tokens", {"logprobs": True}, [delta(logprobs=LONG)], "2 logprobs for 1 tokens"),
    ("tokens without logprobs", {"logprobs": True}, [delta()], "1 tokens without logprobs"),
    ("routes in a delta", {}, [delta(routed_experts=ROUTES)], "a side channel before the terminal event"),
    ("a mask in a delta", {}, [delta(sampling_mask=MASK)], "a side channel before the terminal event"),
    ("versions in a delta", {}, [delta(policy_versions=[("v", 0)])], "a side channel before the terminal event"),
    ("routes missing", {"routes": True}, [done()], "were asked for and are missing"),
    ("routes unasked", {"routes": False}, [done(routed_experts=ROUTES)], "were not asked for"),
    ("a mask missing", {"mask": True}, [done()], "mask was asked for and is missing"),
    ("a mask unasked", {"mask": False}, [done(sampling_mask=MASK)], "mask was not asked for"),
    ("another start", {"routes_start": 1}, [done(routed_experts=ROUTES)], "start at 0, asked for 1"),
    ("routes on one of two", {"choices": 2}, [done(routed_experts=ROUTES), done(index=1), EndEvent()], r"choices \[1\] lack"),
    ("flat ids", {}, [delta(token_ids=int32([[5]]))], r"int32\[1, 1\], not int32"),
    ("wide ids", {}, [delta(token_ids=np.array([5]))], r"int64\[1\], not int32"),
    ("no finish", {}, [done(finish_reason="done")], "finish reason 'done'"),
    ("no event", {}, [ErrorEvent(status=500, error={})], "ErrorEvent is no event of a request"),
    ("some ranks", {"logprobs": True}, [delta(logprobs=LOGPROBS), done(logprobs=TokenLogprobs(values=float32([-1]), ranks=int32([1])))], "some deltas carry ranks"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "events", "says"), [case[1:] for case in BREACHES], ids=[c[0] for c in BREACHES])
def test_a_breach_is_refused_with_its_numbers(changes: dict[str, Any], events: list[Any], says: str) -> None:
    fold = Fold(plan(**changes))
    for event in events[:-1]:
        fold.add(event)
    with pytest.raises(EngineProtocolError, match=says):
        fold.add(events[-1])


def test_no_answer_before_the_end() -> None:
    fold = Fold(plan())
    fold.add(done())
    assert repr(fold) == "<Fold r: 1/1 choices>"
    with pytest.raises(EngineProtocolError, match="stopped before the end of request r"):
        fold.response()
    fold.add(EndEvent())
    assert repr(fold) == "<Fold r: 1/1 choices, ended>"
    assert fold.response().usage.total_tokens == 4


def test_a_prompt_that_media_expand_is_as_long_as_the_engine_says() -> None:
    fold = Fold(plan(prompt_tokens=None))
    with pytest.raises(EngineProtocolError, match="did not say the prompt's length"):
        fold.add(done())
    fold = Fold(plan(prompt_tokens=None))
    fold.add(PromptEvent(prompt_tokens=40, cached_tokens=16))
    fold.add(done())
    assert (fold.usage.prompt_tokens, fold.usage.cached_tokens) == (40, 16)


def test_prompt_logprobs_are_checked_when_they_come() -> None:
    broken = PromptLogprobs(
        ids=int32([2, 3]), values=float32([-1, -1]), ranks=int32([1, 1]), offsets=int32([0, 0, 1, 2])
    )
    ids = int32([1, 2, 9])
    with pytest.raises(EngineProtocolError, match="position 2 begins with id 3, the prompt has 9"):
        Fold(plan()).add(PromptEvent(prompt_tokens=3, prompt_token_ids=ids, prompt_logprobs=broken))
    fold = Fold(plan(prompt_logprobs=True))
    fold.add(done())
    fold.add(EndEvent())
    with pytest.raises(EngineProtocolError, match="prompt logprobs were asked for and are missing"):
        fold.response()


def test_a_terminal_without_tokens_keeps_what_came_before() -> None:
    fold = Fold(plan(logprobs=True))
    fold.add(delta(logprobs=LOGPROBS))
    choice = fold.add(done(token_ids=int32([]), finish_reason="abort"))
    assert choice is not None
    assert (choice.token_ids.tolist(), choice.finish_reason) == ([5], "abort")
    empty = Fold(plan(logprobs=True)).add(done(token_ids=int32([]), finish_reason="abort"))
    assert empty is not None
    assert empty.logprobs is not None
    assert empty.logprobs.values.size == 0


def test_opposite_errors_in_two_deltas_do_not_cancel_out() -> None:
    def top(ids: list[int], offsets: list[int]) -> TokenLogprobs:
        n = len(ids)
        held = Alternatives(ids=int32(ids), values=float32([-1] * n), ranks=int32([1] * n), offsets=int32(offsets))
        return TokenLogprobs(values=float32([-1]), alternatives=held)

    good = concat_logprobs([top([7], [0, 1]), top([8, 9], [0, 2])])
    assert good.alternatives is not None
    assert good.alternatives.offsets.tolist() == [0, 1, 3]
    for first, second in [(top([7, 8], [0, 1]), top([9], [0, 2])), (top([7], [0, 1, 1]), top([8], [0]))]:
        with pytest.raises(EngineProtocolError, match="a delta of 1 tokens has"):
            concat_logprobs([first, second])
    ranked = msgspec.structs.replace(top([7], [0, 1]), ranks=int32([1, 2]))
    with pytest.raises(EngineProtocolError, match="has 2 ranks"):
        concat_logprobs([ranked, msgspec.structs.replace(ranked, ranks=int32([]))])


@given(st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=5))
def test_ids_are_concatenated_in_order(parts: list[list[int]]) -> None:
    found = concat_ids([int32(ids) for ids in parts])
    assert (found.tolist(), found.dtype) == ([x for ids in parts for x in ids], np.int32)


def test_a_request_aborted_before_its_prompt_was_computed_has_nothing_to_say_of_it() -> None:
    fold = Fold(plan(prompt_logprobs=True))
    fold.add(PromptEvent(prompt_tokens=3))
    fold.add(ChoiceEvent(index=0, token_ids=np.empty(0, dtype=np.int32), finish_reason="abort"))
    fold.add(EndEvent())
    response = fold.response()
    assert response.prompt_logprobs is None
    check_again(response, plan(prompt_logprobs=True))
