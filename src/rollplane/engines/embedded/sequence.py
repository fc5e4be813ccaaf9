"""What one request asks of the step loop, and the state of each of its n sequences."""

import random
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rollplane.engines.embedded.prompt_logprobs import PromptLogprobsBuilder
from rollplane.engines.embedded.sampler import NEG_INF, Controls, penalize
from rollplane.engines.embedded.stops import StopMatcher
from rollplane.protocol.arrays import Int32Array


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A request as the step loop takes it: validated, every default resolved.

    Args:
        prompt: int32 [P], P >= 1.
        max_tokens: at least 1, and P + max_tokens fits the context.
        min_tokens: end-of-sequence and stop ids cannot be drawn before this many tokens.
        logprobs: None off; 0 the sampled token's; k also the k likeliest.
        logprob_token_ids: instead of the k likeliest, these ids.
        prompt_logprobs: None off; k the prompt's tokens and the k likeliest, of the model's own distribution.
        routes_start: first row of routed experts to return, 0 <= start < P.
        adapter: the engine-side name of a loaded adapter.
        priority: lower starts earlier.
        stream: report tokens after every step.
    """

    request_id: str
    prompt: Int32Array
    max_tokens: int
    controls: Controls = field(default_factory=Controls)
    n: int = 1
    seed: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    sampling_mask: bool = False
    routed_experts: bool = False
    routes_start: int = 0
    adapter: str | None = None
    priority: int = 0
    stream: bool = False

    @property
    def alternatives(self) -> int:
        """How many alternatives are kept per generated token."""
        return len(self.logprob_token_ids) or (self.logprobs or 0)


class LogitRules:
    """A request's edits of its logits row before temperature; made only for requests that have any.

    Allowed ids, ids banned until `min_tokens`, bias, penalties, in this order.
    """

    def __init__(self, request: Generation, *, vocab: int, eos_ids: frozenset[int]) -> None:
        self._banned: Tensor | None = None
        if request.allowed_token_ids is not None:
            self._banned = torch.ones(vocab, dtype=torch.bool)
            self._banned[list(request.allowed_token_ids)] = False
        self._min_tokens = request.min_tokens
        self._ending = torch.tensor(sorted(eos_ids | request.stop_token_ids), dtype=torch.int64)
        self._bias_ids = torch.tensor([i for i, _ in request.logit_bias], dtype=torch.int64)
        self._bias = torch.tensor([b for _, b in request.logit_bias], dtype=torch.float32)
        self._repetition = request.repetition_penalty
        self._presence = request.presence_penalty
        self._frequency = request.frequency_penalty
        self._penalized = bool(self._repetition != 1 or self._presence or self._frequency)
        if self._penalized:
            self._seen = torch.zeros(vocab, dtype=torch.bool)
            self._seen[torch.from_numpy(request.prompt.astype(np.int64))] = True
            self._counts = torch.zeros(vocab)

    @staticmethod
    def needed(request: Generation) -> bool:
        """Whether this request edits its logits at all."""
        return bool(
            request.allowed_token_ids is not None
            or request.min_tokens
            or request.logit_bias
            or request.repetition_penalty != 1
            or request.presence_penalty
            or request.frequency_penalty
        )

    def apply(self, row: Tensor, *, generated: int) -> None:
        """Edit one row [V] in place; `generated` tokens came before it."""
        if self._banned is not None:
            row.masked_fill_(self._banned, NEG_INF)
        if generated < self._min_tokens:
            row[self._ending] = NEG_INF
        if len(self._bias_ids):
            row[self._bias_ids] += self._bias
        if self._penalized:
            penalize(
                row,
                seen=self._seen,
                counts=self._counts,
                repetition=self._repetition,
                presence=self._presence,
                frequency=self._frequency,
            )

    def observe(self, token_id: int) -> None:
        """Count a generated token."""
        if self._penalized:
            self._seen[token_id] = True
            self._counts[token_id] += 1


@dataclass(eq=False, slots=True)
class Sequence:
    """One of a request's n completions while it runs. Its tokens and numbers are in the slot table, not here.

    Args:
        eos_ids: the model's end-of-sequence ids; empty if the request ignores them.
        prompt_logprobs: shared by the n sequences of a request, None unless asked for.
        slot: its slot, -1 before it has one.
        generated: completion tokens so far.
        computed: token positions whose keys and values are valid; total - 1 when ready to decode.
        spans: (policy version, first output index), appended when a token is sampled.
        mask_rows: one int32 array of surviving ids per token, when asked for.
        recomputed_rows: leading rows whose keys and values were computed again, under the weights of that time.
        cleared_at: completion tokens at the last loss of all keys and values, -1 without one.
        delivered: completion tokens already reported (streams).
        finish_reason: stop, length, abort or error; None while it runs.
    """

    request: Generation
    index: int
    rng: random.Random
    eos_ids: frozenset[int]
    rules: LogitRules | None
    matcher: StopMatcher | None
    prompt_logprobs: PromptLogprobsBuilder | None = None
    slot: int = -1
    generated: int = 0
    computed: int = 0
    spans: list[tuple[str, int]] = field(default_factory=list)
    mask_rows: list[Int32Array] = field(default_factory=list)
    recomputed_rows: int = 0
    cleared_at: int = -1
    delivered: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.request.prompt)

    @property
    def total(self) -> int:
        """Prompt and completion tokens held."""
        return self.prompt_tokens + self.generated

    def clear(self) -> None:
        """Keys and values are gone; they are computed again before the next token."""
        self.computed = 0
        self.cleared_at = self.generated

    def recompute(self, rows: int) -> None:
        """Keys and values of the first `rows` positions are valid again, under the weights that serve now."""
        self.computed = rows
        self.recomputed_rows = max(self.recomputed_rows, rows)

    def accept(self, token_id: int, *, version: str) -> None:
        """Count a sampled token and decide whether it ends the sequence. The ending token stays in the completion."""
        if not self.spans or self.spans[-1][0] != version:
            self.spans.append((version, self.generated))
        self.generated += 1
        if self.rules is not None:
            self.rules.observe(token_id)
        request = self.request
        if token_id in self.eos_ids:
            self.finish_reason = "stop"
            return
        if token_id in request.stop_token_ids:
            self.finish_reason, self.stop_reason = "stop", token_id
            return
        if self.matcher is not None:
            self.stop_reason = self.matcher.feed(token_id)
            if self.stop_reason is not None:
                self.finish_reason = "stop"
                return
        if self.generated >= request.max_tokens:
            self.finish_reason = "length"


def child_rng(seed: int | None, index: int) -> random.Random:
    """The generator of child `index`: from `seed + index`, or from the operating system without a seed."""
    return random.Random() if seed is None else random.Random((seed + index) % 2**64)
