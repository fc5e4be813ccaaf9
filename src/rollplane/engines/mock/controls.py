"""What a request's sampling parameters mean to the mock's language model."""

import math
from dataclasses import dataclass, field
from typing import Final

from rollplane.engines.mock.settings import MockSettings
from rollplane.protocol.sampling import SamplingParams

DECAY: Final = 0.35
"""Logit difference between neighbouring ranks: the best token has a probability of 0.30 at temperature 1."""

_STEEPEST: Final = 1e6

HONOURED = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "stop_token_ids",
    "ignore_eos",
    "max_tokens",
    "min_tokens",
    "logit_bias",
    "allowed_token_ids",
    "skip_reading_prefix_cache",
    "routed_experts_prompt_start",
)
"""The sampling parameters the mock honours; the others are refused by name."""


@dataclass(frozen=True, kw_only=True)
class Controls:
    """Sampling controls of one request, neutral where it set none.

    `alternatives`: most likely tokens reported per position, None without logprobs. `stop_ids` end a choice;
    `held_ids` (EOS and stop ids) cannot be sampled before `min_tokens`.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    logprobs: bool = False
    alternatives: int = 0
    mask: bool = False
    min_tokens: int = 0
    eos_ids: frozenset[int] = frozenset()
    stop_ids: frozenset[int] = frozenset()
    allowed_ids: tuple[int, ...] | None = None
    bias: dict[int, float] = field(default_factory=dict)

    @property
    def greedy(self) -> bool:
        """Temperature 0: always the best token; its log-probability is reported at temperature 1."""
        return self.temperature == 0

    @property
    def bends(self) -> bool:
        """Whether ranks are not a plain geometric distribution."""
        return self.allowed_ids is not None or bool(self.bias)

    @property
    def held_ids(self) -> list[int]:
        """Ids that `min_tokens` holds back."""
        return sorted(self.eos_ids | self.stop_ids) if self.min_tokens else []

    @property
    def slope(self) -> float:
        """Logit difference between neighbouring ranks after temperature."""
        return DECAY if self.greedy else min(DECAY / self.temperature, _STEEPEST)

    def support(self, vocab: int) -> int:
        """How many ranks survive top-k, min-p and top-p, in that order, of the plain distribution."""
        kept = min(vocab, self.top_k) if self.top_k else vocab
        if self.min_p > 0:
            kept = min(kept, math.floor(-math.log(self.min_p) / self.slope) + 1)
        if self.top_p < 1:
            mass = -math.expm1(-self.slope * kept)
            kept = min(kept, max(math.ceil(math.log1p(-self.top_p * mass) / -self.slope - 1e-9), 1))
        return kept


def read_controls(params: SamplingParams, settings: MockSettings, *, mask: bool, vocab: int) -> Controls:
    """The controls of a checked request."""
    logprobs = params.get("logprobs")
    allowed = params.get("allowed_token_ids")
    return Controls(
        temperature=float(params.get("temperature", 1.0)),
        top_k=params.top_k_limit,
        top_p=float(params.get("top_p", 1.0)),
        min_p=float(params.get("min_p", 0.0)),
        logprobs=logprobs is not None,
        alternatives=0 if logprobs is None else vocab if logprobs == -1 else min(int(logprobs), vocab),
        mask=mask,
        min_tokens=int(params.get("min_tokens", 0)),
        eos_ids=frozenset() if params.get("ignore_eos", False) else frozenset({settings.eos_token_id}),
        stop_ids=frozenset(params.get("stop_token_ids", [])),
        allowed_ids=None if allowed is None else tuple(allowed),
        bias=dict(params.get("logit_bias", {})),
    )
