"""Many answers as one set of arrays: what a trainer keeps of a rollout, and how it is saved.

Letters for shapes: B choices, S tokens of the longest sequence, N output tokens of all choices together, L MoE layers,
K experts per token, M ids of all sampling masks together.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollplane.client.replay import RoutedTurn, Spans, check_mask, pad_routes, span_ranges, stitch_routes


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollouts:
    """Answers of one rollout, right-padded; output tokens of all choices lie flat, one choice after the other.

    Attributes:
        token_ids: int32 [B, S], prompt and output, padded with 0.
        prompt_tokens: int32 [B].
        output_tokens: int32 [B], none of them 0.
        logprobs: float32 [N], of the sampled tokens, by the engine, in nats.
        routes: int16 [B, S, L, K], `UNRECORDED` where nothing was recorded.
        mask_ids: int32 [M].
        mask_offsets: int32 [N + 1].
        spans: one JSON text per choice, `[[version, first_output_index], ...]`.
        rewards: float32 [B].
    """

    token_ids: NDArray[np.int32]
    prompt_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    routes: NDArray[np.int16]
    mask_ids: NDArray[np.int32]
    mask_offsets: NDArray[np.int32]
    spans: NDArray[np.str_]
    rewards: NDArray[np.float32]

    @property
    def choice_of_token(self) -> NDArray[np.int64]:
        """The choice of every output token, int64 [N]."""
        return np.repeat(np.arange(len(self.output_tokens)), self.output_tokens)

    @property
    def position_of_token(self) -> NDArray[np.int64]:
        """The sequence position of every output token, int64 [N]; the logits for it lie one position before."""
        first = np.concatenate([[0], np.cumsum(self.output_tokens)[:-1]])
        within = np.arange(int(self.output_tokens.sum())) - np.repeat(first, self.output_tokens)
        return np.asarray(within + np.repeat(self.prompt_tokens, self.output_tokens), dtype=np.int64)

    @property
    def sampled(self) -> NDArray[np.int32]:
        """The output tokens, int32 [N]."""
        return self.token_ids[self.choice_of_token, self.position_of_token]

    @property
    def versions(self) -> list[Spans]:
        """`policy_versions` of every choice."""
        return [json.loads(text) for text in self.spans.tolist()]

    @property
    def version_of_token(self) -> NDArray[np.str_]:
        """The policy version that made every output token, [N]; empty text where that is not known."""
        names: list[str] = []
        for spans, tokens in zip(self.versions, self.output_tokens.tolist(), strict=True):
            for version, begin, end in span_ranges(spans, tokens=tokens):
                names.extend([version or ""] * (end - begin))
        return np.array(names, dtype=np.str_)

    def save(self, path: Path) -> None:
        """Write one `.npz` file."""
        np.savez_compressed(path, **{field.name: getattr(self, field.name) for field in fields(self)})

    @classmethod
    def load(cls, path: Path) -> "Rollouts":
        """Read what `save` wrote."""
        with np.load(path, allow_pickle=False) as arrays:
            return cls(**{field.name: arrays[field.name] for field in fields(cls)})


def collect(prompts: Sequence[Sequence[int]], choices: Sequence[Any], *, experts: int, vocabulary: int) -> Rollouts:
    """Check every choice and lay all of them out for a trainer; rewards are 0 until they are known.

    Args:
        prompts: the prompt of each choice.
        choices: `GenerateResponse.choices` of the client, in the same order, with log-probabilities, routes and masks.
        experts: experts per MoE layer.
        vocabulary: ids of the model.

    Raises:
        ReplayError: an array that breaks its invariants, with the numbers.
    """
    rows = []
    longest = 0
    for prompt, choice in zip(prompts, choices, strict=True):
        outputs = len(choice.token_ids)
        routed, mask = choice.routed_experts, choice.sampling_mask
        turn = RoutedTurn(routed.array, prompt_tokens=len(prompt), completion_tokens=outputs, start=routed.start)
        rows.append(stitch_routes([turn], experts=experts))
        check_mask(mask.ids, mask.offsets, choice.token_ids, vocabulary=vocabulary)
        span_ranges(choice.policy_versions, tokens=outputs)
        longest = max(longest, len(prompt) + outputs)
    token_ids = np.zeros((len(choices), longest), dtype=np.int32)
    for row, (prompt, choice) in enumerate(zip(prompts, choices, strict=True)):
        token_ids[row, : len(prompt)] = prompt
        token_ids[row, len(prompt) : len(prompt) + len(choice.token_ids)] = choice.token_ids
    widths = np.concatenate([np.diff(choice.sampling_mask.offsets) for choice in choices])
    return Rollouts(
        token_ids=token_ids,
        prompt_tokens=np.array([len(prompt) for prompt in prompts], dtype=np.int32),
        output_tokens=np.array([len(choice.token_ids) for choice in choices], dtype=np.int32),
        logprobs=np.concatenate([choice.logprobs.values for choice in choices]).astype(np.float32),
        routes=pad_routes(rows, tokens=longest).astype(np.int16),
        mask_ids=np.concatenate([choice.sampling_mask.ids for choice in choices]).astype(np.int32),
        mask_offsets=np.concatenate([[0], widths.cumsum()]).astype(np.int32),
        spans=np.array([json.dumps([list(span) for span in choice.policy_versions]) for choice in choices]),
        rewards=np.zeros(len(choices), dtype=np.float32),
    )
