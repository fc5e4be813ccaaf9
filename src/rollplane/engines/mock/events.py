"""What the mock says of a request, as events: the prompt's, each choice's, and the last word."""

from rollplane.engines.mock.draws import Draws
from rollplane.engines.mock.language import Language
from rollplane.engines.mock.live import Live, Sequence
from rollplane.engines.mock.routes import Router
from rollplane.protocol.events import ChoiceEvent, EndEvent, FinishReason, PromptEvent, ServedBy


def prompt_event(live: Live, language: Language, *, scope: int, caches: bool) -> PromptEvent:
    """The facts of a prompt that was computed. `caches`: whether there is a prefix cache to tell of."""
    request = live.request
    asked = request.sampling.get("prompt_logprobs")
    places: dict[str, list[dict[str, object]]] | None = None
    if request.features and request.return_token_ids:
        places = {}
        for item in request.features:
            places.setdefault(item.modality, []).append({"offset": item.offset, "length": item.length})
    wrong = 1 if live.fault is not None and live.fault.kind == "wrong_prompt_count" else 0
    return PromptEvent(
        prompt_tokens=request.prompt_tokens + wrong,
        cached_tokens=live.cached_tokens if caches else None,
        prompt_token_ids=request.token_ids if request.return_token_ids else None,
        prompt_logprobs=None
        if asked is None
        else language.score(scope, request.token_ids, alternatives=language.modulus if asked == -1 else int(asked)),
        mm_placeholders=places,
    )


def delta_event(sequence: Sequence, made: int) -> ChoiceEvent:
    """A choice's tokens since what was sent before."""
    part = sequence.draws.cut(sequence.sent, made)
    return ChoiceEvent(
        index=sequence.index, token_ids=part.ids, logprobs=part.logprobs() if sequence.live.by.logprobs else None
    )


def ending_event(
    sequence: Sequence, whole: Draws, *, reason: FinishReason, version: str, router: Router | None
) -> ChoiceEvent:
    """A choice's last tokens, and what is told once for all of them, which are `whole`. `version`: of one that never began."""
    live, made = sequence.live, len(whole)
    event = delta_event(sequence, made)
    event.finish_reason = reason
    event.stop_reason = sequence.stop_reason if reason == "stop" else None
    event.sampling_mask = whole.mask()
    event.policy_versions = [(version, 0)] if sequence.labels is None else sequence.labels.read(made)
    if live.want_routes and router is not None:
        start = int(live.request.sampling.get("routed_experts_prompt_start", 0))
        segments = [s for s in sequence.segments if s[1] == 0 or s[1] < made]
        event.routed_experts = router.capture(segments, live.request.token_ids, whole.ids, start=start)
    return event


def end_event(live: Live) -> EndEvent:
    """A request's last word."""
    by = live.by
    return EndEvent(
        served_by=ServedBy(
            logprobs_mode="greedy" if by.greedy else "sampling",
            sampling_mask_mode=None if not by.mask else "greedy" if by.greedy else "sampling",
            floored_logprobs=live.floored,
            recomputed=[(0, live.recomputed_rows)] if live.recomputed_rows else [],
        )
    )
