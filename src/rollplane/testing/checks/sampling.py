"""Checks of sampling: seeds, limits, stops, side channels, and refusals of what cannot be served."""

from typing import Any

import numpy as np

from rollplane.errors import ContextOverflow, InvalidRequest
from rollplane.protocol.artifacts import LOGPROB_FLOOR
from rollplane.protocol.features import MediaItem
from rollplane.protocol.request import GenerateRequest
from rollplane.protocol.response import GenerateResponse
from rollplane.testing.checks.subject import (
    LOGPROB_TOLERANCE,
    CheckFailed,
    NotApplicable,
    Subject,
    must,
    refusal,
    same,
    same_answer,
    watching,
    within,
)
from rollplane.testing.requests import answer, make_request


async def _ask(subject: Subject, prompt: list[int] | None = None, **asked: Any) -> GenerateResponse:
    request = make_request(prompt or subject.prompt(), **{"ignore_eos": True, **asked})
    return await within(answer(subject.engine, request), "an answer")


async def answers_keep_the_contract(subject: Subject) -> None:
    """With everything asked for that the engine has, the answer passes every invariant of the response."""
    caps = subject.engine.info.capabilities
    options = {"routed_experts": caps.routed_experts, "sampling_mask": caps.sampling_mask}
    asked: dict[str, Any] = {"n": 2, "seed": 4, "max_tokens": 9, "logprobs": 3, "top_k": 8, "top_p": 0.95}
    if caps.prompt_logprobs:
        asked["prompt_logprobs"] = 2
    got = await _ask(subject, subject.prompt(20), options=options, **asked)
    must(got.usage.completion_tokens == 18, f"2 choices of 9 tokens are {got.usage.completion_tokens}")
    for choice in got.choices:
        must(choice.finish_reason == "length", f"9 of 9 tokens ended with {choice.finish_reason}")
        must(int(choice.token_ids.max()) < subject.engine.info.vocab_bound, "an id outside the vocabulary")
        top = choice.logprobs.alternatives if choice.logprobs is not None else None
        must(top is not None and bool((np.diff(top.offsets) == 3).all()), "3 alternatives were asked for per token")


async def seeds_repeat_alone_and_in_company(subject: Subject) -> None:
    """One seed gives the same tokens alone, again, and among seven others."""
    subject.honours("seed")
    first = await _ask(subject, seed=21, max_tokens=16)
    same_answer(first, await _ask(subject, seed=21, max_tokens=16), "one seed twice")
    others = [
        make_request(subject.prompt(5 + i, variant=i + 1), seed=i, max_tokens=12 + i, ignore_eos=True) for i in range(7)
    ]
    own = make_request(subject.prompt(), seed=21, max_tokens=16, ignore_eos=True)
    async with watching(subject.engine, *others[:4], own, *others[4:]) as watches:
        got = await watches[4].answer()
        for watch in watches:
            await watch.answer()
    same_answer(first, got, "one seed alone and among seven")


async def other_seeds_and_no_seed_differ(subject: Subject) -> None:
    """Two seeds, and requests without a seed, sample differently."""
    answers = [await _ask(subject, seed=i, max_tokens=16) for i in (1, 2)]
    answers += [await _ask(subject, max_tokens=16) for _ in range(3)]
    distinct = {a.choices[0].token_ids.tobytes() for a in answers}
    must(len(distinct) >= 4, f"5 samples of 16 tokens have {len(distinct)} distinct outcomes")


async def choices_are_single_requests_with_seed_plus_index(subject: Subject) -> None:
    """The n choices of a seed are what n single requests with seed + index give; each has its own logprobs."""
    subject.honours("seed")
    many = await _ask(subject, n=3, seed=40, max_tokens=10, logprobs=0)
    distinct = {choice.token_ids.tobytes() for choice in many.choices}
    must(len(distinct) == 3, f"3 choices of one seed have {len(distinct)} distinct outcomes")
    for i, choice in enumerate(many.choices):
        one = (await _ask(subject, seed=40 + i, max_tokens=10, logprobs=0)).choices[0]
        same(one.token_ids, choice.token_ids, f"seed {40 + i} alone and as choice {i}")
        if one.logprobs is None or choice.logprobs is None:
            raise CheckFailed("logprobs were asked for")
        gap = float(np.abs(one.logprobs.values - choice.logprobs.values).max())
        must(gap <= LOGPROB_TOLERANCE, f"choice {i}: logprobs are {gap:g} nats from those of the single request")


async def greedy_needs_no_seed(subject: Subject) -> None:
    """At temperature 0 the seed makes no difference, and its logprobs are named so."""
    a = await _ask(subject, temperature=0.0, seed=1, max_tokens=12, logprobs=0)
    b = await _ask(subject, temperature=0.0, seed=2, max_tokens=12, logprobs=0)
    same_answer(a, b, "greedy with two seeds")


async def no_top_k_has_four_spellings(subject: Subject) -> None:
    """top_k absent, null, 0 and -1 are alike."""
    subject.honours("top_k")
    answers = [await _ask(subject, seed=6, max_tokens=16, **asked) for asked in ({}, {"top_k": None})]
    answers += [await _ask(subject, seed=6, max_tokens=16, top_k=k) for k in (0, -1)]
    for name, got in zip(("null", "0", "-1"), answers[1:], strict=True):
        same_answer(answers[0], got, f"top_k absent and {name}")


async def top_k_one_is_greedy(subject: Subject) -> None:
    """Truncation to one token leaves the best one, and a sampling distribution of one certain token."""
    subject.honours("top_k")
    greedy = await _ask(subject, temperature=0.0, max_tokens=8)
    top = await _ask(subject, top_k=1, seed=9, max_tokens=8, logprobs=0)
    same(greedy.choices[0].token_ids, top.choices[0].token_ids, "greedy and top_k 1")
    if top.served_by.logprobs_mode == "sampling" and top.choices[0].logprobs is not None:
        gap = float(np.abs(top.choices[0].logprobs.values).max())
        must(gap <= LOGPROB_TOLERANCE, f"a certain token has the logprob -{gap:g} in mode `sampling`")


async def omitted_max_tokens_is_the_room_that_is_left(subject: Subject) -> None:
    """Without max_tokens a choice runs to the end of the context, not to a default of 16; 16 stays 16."""
    context = subject.engine.info.max_model_len
    if context > 16_384:
        raise NotApplicable(f"its context of {context} tokens is too long to fill here")
    prompt = subject.prompt(context - 37)
    got = (await _ask(subject, prompt, seed=1)).choices[0]
    must(got.token_ids.size == 37, f"37 tokens fit after the prompt, it made {got.token_ids.size}")
    must(got.finish_reason == "length", f"the end of the context is called {got.finish_reason}")
    short = (await _ask(subject, seed=1, max_tokens=16)).choices[0]
    must(short.token_ids.size == 16 and short.finish_reason == "length", f"16 tokens became {short.token_ids.size}")
    over = (await _ask(subject, prompt, seed=1, max_tokens=500)).choices[0]
    must(over.token_ids.size == 37, f"max_tokens past the context made {over.token_ids.size} tokens, 37 fit")


async def stop_ids_end_a_choice(subject: Subject) -> None:
    """A stop id ends the choice, is its last token, and is named as the reason; min_tokens holds it back."""
    subject.honours("stop_token_ids", "seed")
    free = (await _ask(subject, seed=13, max_tokens=24)).choices[0].token_ids.tolist()
    stop = free[5]
    cut = free[: free.index(stop) + 1]
    got = (await _ask(subject, seed=13, max_tokens=24, stop_token_ids=[stop])).choices[0]
    must(got.token_ids.tolist() == cut, f"stopped at {stop}: {got.token_ids.tolist()}, must be {cut}")
    must((got.finish_reason, got.stop_reason) == ("stop", stop), f"ended with {got.finish_reason}, {got.stop_reason}")
    if "min_tokens" in subject.engine.info.capabilities.sampling_fields:
        later = (await _ask(subject, seed=13, max_tokens=24, stop_token_ids=[stop], min_tokens=12)).choices[0]
        ids = later.token_ids.tolist()
        must(stop not in ids[:12], f"the stop id {stop} was sampled before min_tokens: {ids}")
        must(len(ids) >= 12, f"{len(ids)} tokens, min_tokens is 12")


async def uneven_choices_all_end(subject: Subject) -> None:
    """When one choice ends early, the others go on: unary and streamed."""
    subject.honours("stop_token_ids", "seed")
    free = await _ask(subject, n=3, seed=50, max_tokens=20)
    stop = int(free.choices[1].token_ids[3])
    got = [await _ask(subject, n=3, seed=50, max_tokens=20, stop_token_ids=[stop], stream=s) for s in (False, True)]
    same_answer(got[0], got[1], "uneven choices unary and streamed")
    for before, after in zip(free.choices, got[0].choices, strict=True):
        ids = before.token_ids.tolist()
        wanted = ids[: ids.index(stop) + 1] if stop in ids else ids
        must(after.token_ids.tolist() == wanted, f"choice {after.index} has {after.token_ids.tolist()}, not {wanted}")


async def allowed_ids_bound_the_support(subject: Subject) -> None:
    """With one allowed id only it comes; alternatives without probability are floored and counted, never infinite."""
    subject.honours("allowed_token_ids")
    got = await _ask(subject, allowed_token_ids=[7], logprobs=5, max_tokens=3, seed=1)
    choice = got.choices[0]
    must(choice.token_ids.tolist() == [7, 7, 7], f"only 7 was allowed, got {choice.token_ids.tolist()}")
    top = choice.logprobs.alternatives if choice.logprobs is not None else None
    if top is None:
        raise CheckFailed("alternatives were asked for")
    floored = int((top.values == LOGPROB_FLOOR).sum())
    must(
        got.served_by.floored_logprobs == floored,
        f"{floored} alternatives are floored, the answer counts {got.served_by.floored_logprobs}",
    )


async def masks_are_the_support(subject: Subject) -> None:
    """A sampling mask has as many ids as top-k leaves, and the sampled one among them."""
    if not subject.engine.info.capabilities.sampling_mask:
        raise NotApplicable("it returns no sampling masks")
    got = await _ask(subject, options={"sampling_mask": True}, top_k=5, seed=2, max_tokens=10)
    mask = got.choices[0].sampling_mask
    if mask is None:
        raise CheckFailed("a mask was asked for")
    must(bool((np.diff(mask.offsets) == 5).all()), f"top_k 5 leaves {np.diff(mask.offsets).tolist()} ids")
    without = await _ask(subject, options={"sampling_mask": False}, top_k=5, seed=2, max_tokens=10)
    must(without.choices[0].sampling_mask is None, "a mask that was not asked for")
    same(got.choices[0].token_ids, without.choices[0].token_ids, "tokens with and without a mask")


async def routes_begin_where_asked(subject: Subject) -> None:
    """Rows from a start are the tail of all rows; the next turn has the row of the former last token."""
    if not subject.engine.info.capabilities.routed_experts:
        raise NotApplicable("it returns no routed experts")
    options = {"routed_experts": True}
    prompt = subject.prompt(24)
    whole = (await _ask(subject, prompt, options=options, temperature=0.0, max_tokens=6)).choices[0]
    tail = (
        await _ask(subject, prompt, options=options, temperature=0.0, max_tokens=6, routed_experts_prompt_start=20)
    ).choices[0]
    if whole.routed_experts is None or tail.routed_experts is None:
        raise CheckFailed("routes were asked for")
    must(tail.routed_experts.start == 20, f"asked for rows from 20, the answer says {tail.routed_experts.start}")
    same(whole.routed_experts.array[20:], tail.routed_experts.array, "all rows from 20 on, and rows asked from 20 on")
    turn = [*prompt, *whole.token_ids.tolist(), *subject.prompt(4, variant=3)]
    last = len(prompt) + 5
    cold = (await _ask(subject, turn, options=options, temperature=0.0, max_tokens=2)).choices[0].routed_experts
    warm = (
        (await _ask(subject, turn, options=options, temperature=0.0, max_tokens=2, routed_experts_prompt_start=last))
        .choices[0]
        .routed_experts
    )
    if cold is None or warm is None:
        raise CheckFailed("routes were asked for")
    same(np.ascontiguousarray(cold.array[last:]), warm.array, "the next turn's rows, all and from the last token on")


async def prompts_are_scored_alike(subject: Subject) -> None:
    """Prompt logprobs have a row per position, the prompt's own id first; scoring twice gives the same."""
    if not subject.engine.info.capabilities.prompt_logprobs:
        raise NotApplicable("it scores no prompts")
    prompt = subject.prompt(12)
    got = [await _ask(subject, prompt, prompt_logprobs=1, max_tokens=1, seed=1) for _ in range(2)]
    first, second = got[0].prompt_logprobs, got[1].prompt_logprobs
    if first is None or second is None:
        raise CheckFailed("prompt logprobs were asked for")
    own = first.ids[first.offsets[1:-1]]
    must(own.tolist() == prompt[1:], f"the first id of each row is {own.tolist()}, the prompt goes {prompt[1:]}")
    gap = float(np.abs(first.values - second.values).max())
    must(gap <= LOGPROB_TOLERANCE, f"one prompt scored twice: {gap:g} nats apart")


async def what_cannot_be_served_is_refused(subject: Subject) -> None:
    """Bad ids, over-long lists and abilities it lacks are refused before any work, naming the field; others go on."""
    control = await _ask(subject, seed=77, max_tokens=8)
    for name, request in _unservable(subject):
        error = await refusal(subject.engine, request)
        must(isinstance(error, InvalidRequest), f"{name}: {error!r}, must be InvalidRequest")
        must(getattr(error, "param", None) is not None, f"{name}: the refusal names no field: {error!r}")
    over = await refusal(subject.engine, make_request(subject.prompt(subject.engine.info.max_model_len)))
    must(isinstance(over, ContextOverflow), f"a prompt that fills the context: {over!r}")
    must("maximum context length" in str(over), f"clients look for 'maximum context length' in: {over}")
    same_answer(control, await _ask(subject, seed=77, max_tokens=8), "a request before and after the refusals")


async def a_bad_request_leaves_its_neighbour_alone(subject: Subject) -> None:
    """Stop ids outside the vocabulary, beside a running request: refused, and the neighbour's tokens do not change."""
    control = await _ask(subject, seed=78, max_tokens=48)
    own = make_request(subject.prompt(), seed=78, max_tokens=48, ignore_eos=True, stream=True)
    bad: dict[str, Any] = {"stop_token_ids": [2_000_000_000], "min_tokens": 1, "max_tokens": 4}
    async with watching(subject.engine, own) as (watch,):
        await watch.until_tokens(1)
        for _ in range(3):
            error = await refusal(subject.engine, make_request(subject.prompt(), **bad))
            must(isinstance(error, InvalidRequest), f"stop id 2000000000: {error!r}")
        same_answer(control, await watch.answer(), "a request alone and beside bad ones")


def _unservable(subject: Subject) -> list[tuple[str, GenerateRequest]]:
    info, prompt = subject.engine.info, subject.prompt()
    caps, bound = info.capabilities, info.vocab_bound
    found = [
        ("a prompt id past the vocabulary", make_request([*prompt, bound])),
        ("stop_token_ids past the vocabulary", make_request(prompt, stop_token_ids=[bound])),
        ("allowed_token_ids past the vocabulary", make_request(prompt, allowed_token_ids=[bound])),
        ("logit_bias past the vocabulary", make_request(prompt, logit_bias={bound: 1.0})),
        ("more choices than it can run", make_request(prompt, n=info.max_num_seqs + 1)),
        ("more logprobs than it gives", make_request(prompt, logprobs=info.max_logprobs + 1)),
        ("routes from past the prompt", make_request(prompt, routed_experts_prompt_start=len(prompt))),
        ("a field nobody knows", make_request(prompt, fields={"extra": {"surprise": 1}})),
        ("a data-parallel rank it lacks", make_request(prompt, fields={"data_parallel_rank": caps.data_parallel_size})),
    ]
    lists = {
        "stop_token_ids": info.max_stop_token_ids,
        "allowed_token_ids": info.max_allowed_token_ids,
        "logit_bias": info.max_logit_bias,
    }
    for name, width in lists.items():
        if width is not None and width < bound:
            ids = list(range(width + 1))
            long: Any = dict.fromkeys(ids, 1.0) if name == "logit_bias" else ids
            found.append((f"{name} over its width", make_request(prompt, **{name: long})))
    if not caps.stop_strings:
        found.append(("stop strings without a tokenizer", make_request(prompt, stop=["."])))
    if not caps.routed_experts:
        found.append(("routes it has not", make_request(prompt, options={"routed_experts": True})))
    if not caps.sampling_mask:
        found.append(("masks it has not", make_request(prompt, options={"sampling_mask": True})))
    if not caps.prompt_logprobs:
        found.append(("prompt logprobs it has not", make_request(prompt, prompt_logprobs=0)))
    if not caps.priority:
        found.append(("a priority it does not keep", make_request(prompt, fields={"priority": 3})))
    if not caps.transfer_params:
        found.append(("transfer params it cannot take", make_request(prompt, fields={"kv_transfer_params": {"a": 1}})))
    asks: dict[str, Any] = {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
        "min_p": 0.1,
        "bad_words": ["a"],
        "thinking_token_budget": 5,
        "structured_outputs": {"regex": "a+"},
        "extra_args": {"a": 1},
        "logprob_token_ids": [7],
        "allowed_token_ids": [7],
        "logit_bias": {7: 1.0},
        "stop_token_ids": [7],
        "min_tokens": 1,
    }
    found += [
        (f"{name}, which it does not honour", make_request(prompt, **{name: value}))
        for name, value in asks.items()
        if name not in caps.sampling_fields
    ]
    for modality in {"image", "video", "audio"} - set(caps.features):
        item = MediaItem(modality=modality, producer_hash="a", offset=0, length=1, kwargs=b"x")
        found.append((f"{modality} features it does not take", make_request(prompt, fields={"features": [item]})))
    return found


CHECKS = (
    answers_keep_the_contract,
    seeds_repeat_alone_and_in_company,
    other_seeds_and_no_seed_differ,
    choices_are_single_requests_with_seed_plus_index,
    greedy_needs_no_seed,
    no_top_k_has_four_spellings,
    top_k_one_is_greedy,
    omitted_max_tokens_is_the_room_that_is_left,
    stop_ids_end_a_choice,
    uneven_choices_all_end,
    allowed_ids_bound_the_support,
    masks_are_the_support,
    routes_begin_where_asked,
    prompts_are_scored_alike,
    what_cannot_be_served_is_refused,
    a_bad_request_leaves_its_neighbour_alone,
)
