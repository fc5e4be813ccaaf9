"""What a mock engine is like: its size, its speed and the faults it shall have."""

from typing import Literal

import msgspec

from rollplane.errors import InvalidRequest
from rollplane.protocol.info import MoeShape

FaultKind = Literal[
    "fail",
    "foreign_error",
    "hang",
    "die",
    "refuse",
    "routes_row_missing",
    "routes_zero",
    "routes_repeat",
    "routes_missing",
    "nan_logprob",
    "logprob_missing",
    "mask_lacks_sampled",
    "mask_row_empty",
    "negative_token",
    "wrong_index",
    "no_terminal",
    "two_terminals",
    "wrong_prompt_count",
    "no_end",
]
Operation = Literal[
    "generate",
    "stage_weights",
    "apply_weights",
    "load_adapter",
    "unload_adapter",
    "pause",
    "resume",
    "transfer_init",
    "transfer_start",
    "transfer_update",
    "transfer_finish",
    "sleep",
    "wake_up",
]

BREACHES = frozenset(FaultKind.__args__) - {"fail", "foreign_error", "hang", "die", "refuse"}  # type: ignore[attr-defined]
"""Faults that break the answer contract: what `fold` has to catch."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One scripted fault.

    `kind`:
        fail: `EngineFailed`; foreign_error: an error that is not ours (a `RuntimeError`); hang: no more tokens, until
        aborted or closed; die: the whole engine is gone, every request ends with `EngineDied`; refuse: `InvalidRequest`.
        The others spoil the answer as their names say.
    `operation`: which call it befalls. `at`: the k-th call of that operation, from 1, counted over the engine's life.
    `times`: on how many calls in a row. `after_tokens`: generate only; the first choice makes so many tokens first.
    `request_id`: generate only; befalls this request instead of the k-th.
    """

    kind: FaultKind
    operation: Operation = "generate"
    at: int = 1
    times: int = 1
    after_tokens: int = 0
    request_id: str | None = None


class MockSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A mock engine's settings; the defaults are an instant dense text model.

    Model:
        `model`, `aliases`: names it serves. `weights`: a name whose content stands for the first weights; two engines
        with one name make the same tokens. `policy_version`: version label of the first weights.
        `vocab_tokens`: ids are in [0, vocab_tokens); sampled ones are below the largest prime in it.
        `max_model_len`: prompt and completion, tokens. `eos_token_id`: ends a choice unless `ignore_eos`.
        `ending_rate`: share of positions where EOS is the most likely token (0: EOS comes by chance only).
        `moe`: shape of the routed experts, None for a dense model. `sampling_mask`: whether masks are returned.
        `features`: modalities of preprocessed features it takes.
    Room:
        `max_num_seqs`: sequences that run at once; others wait, by priority, then arrival. `block_tokens`,
        `cache_blocks`: size of a KV block and how many are kept (0: no prefix cache). `max_adapters`,
        `max_adapter_rank`: LoRA slots and largest rank (0 slots: no LoRA). `transfer_backend`: name of a weight transfer of
        its own, None for none. `sleep_mode`: whether it can be put to sleep.
    Speed (seconds, less those for which the event loop is held up; 0 and None are instant):
        `prefill_tokens_per_s`: rate at which uncached prompt tokens are computed, one prompt after another.
        `step_s`: one decode step, in which each running sequence gets one token. `step_per_sequence_s`: what each
        running sequence adds to it. `stage_s`, `apply_s`: staging and applying weights.
    Faults: `faults`, in any order; more can be added while it runs (`MockEngine.add_fault`).
    """

    model: str = "mock"
    aliases: tuple[str, ...] = ()
    weights: str = "initial"
    policy_version: str = "initial"
    vocab_tokens: int = 32_003
    max_model_len: int = 4096
    eos_token_id: int = 2
    ending_rate: float = 0.0
    moe: MoeShape | None = None
    sampling_mask: bool = False
    features: tuple[str, ...] = ("image", "video", "audio")
    max_num_seqs: int = 256
    block_tokens: int = 16
    cache_blocks: int = 65_536
    max_adapters: int = 8
    max_adapter_rank: int = 64
    transfer_backend: str | None = None
    sleep_mode: bool = False
    prefill_tokens_per_s: float | None = None
    step_s: float = 0.0
    step_per_sequence_s: float = 0.0
    stage_s: float = 0.0
    apply_s: float = 0.0
    faults: tuple[Fault, ...] = ()

    def check(self) -> None:
        """Refuse values that make no engine.

        Raises:
            InvalidRequest: naming the setting and its limit.
        """
        limits: dict[str, tuple[float, float]] = {
            "vocab_tokens": (8, 2**31 - 1),
            "max_model_len": (2, 2**24),
            "eos_token_id": (0, self.vocab_tokens - 1),
            "ending_rate": (0.0, 1.0),
            "max_num_seqs": (1, 2**20),
            "block_tokens": (1, 2**16),
            "cache_blocks": (0, 2**31 - 1),
            "max_adapters": (0, 2**16),
            "max_adapter_rank": (1, 2**16),
            "step_s": (0.0, 3600.0),
            "step_per_sequence_s": (0.0, 3600.0),
            "stage_s": (0.0, 3600.0),
            "apply_s": (0.0, 3600.0),
        }
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise InvalidRequest(f"{name} must be in [{low}, {high}], got {value!r}", param=name)
        rate = self.prefill_tokens_per_s
        if rate is not None and not rate > 0:
            raise InvalidRequest(f"prefill_tokens_per_s must be > 0, got {rate!r}", param="prefill_tokens_per_s")
        if self.moe is not None and not (self.moe.layers >= 1 and 1 <= self.moe.top_k < self.moe.num_experts):
            raise InvalidRequest(f"moe must have layers >= 1 and 1 <= top_k < num_experts, got {self.moe}", param="moe")
