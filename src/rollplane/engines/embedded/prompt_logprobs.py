"""Log-probabilities of a prompt, collected while it is computed in chunks."""

import numpy as np
import torch
from torch import Tensor

from rollplane.protocol.arrays import Int32Array
from rollplane.protocol.artifacts import LOGPROB_FLOOR, PromptLogprobs


class PromptLogprobsBuilder:
    """Collects a prompt's log-probabilities chunk by chunk.

    They are those of the model's own distribution: log-softmax of the unedited logits at temperature 1.

    Args:
        prompt: int32 [P].
        width: how many of the likeliest ids to add to each position.
    """

    def __init__(self, prompt: Int32Array, width: int) -> None:
        self._prompt = torch.from_numpy(prompt.astype(np.int64))
        self._width = width
        self._taken = False
        self.restart()

    def restart(self) -> None:
        """Forget everything: the prompt is computed again."""
        self._ids: list[Tensor] = []
        self._values: list[Tensor] = []
        self._ranks: list[Tensor] = []

    def add(self, logits: Tensor, start: int) -> None:
        """Logits [T, V] of prompt positions start .. start + T - 1; each predicts the next position's token."""
        targets = self._prompt[start + 1 : start + 1 + len(logits), None]
        logprobs = logits[: len(targets)].log_softmax(-1)
        own = logprobs.gather(1, targets)
        rank = (logprobs > own).sum(-1, keepdim=True) + 1
        top = logprobs.topk(self._width, dim=-1)
        order = torch.arange(1, self._width + 1).expand(len(targets), -1)
        self._ids.append(torch.cat([targets, top.indices], dim=1))
        self._values.append(torch.cat([own, top.values], dim=1))
        self._ranks.append(torch.cat([rank, order], dim=1))

    def take(self) -> tuple[PromptLogprobs | None, int]:
        """Everything as CSR, and how many values were floored; None when it was taken before.

        The prompt's own token comes first in each row and is not repeated among the likeliest.
        """
        if self._taken:
            return None, 0
        self._taken = True
        width = self._width + 1
        ids = torch.cat(self._ids) if self._ids else torch.empty(0, width, dtype=torch.int64)
        keep = torch.ones(ids.shape, dtype=torch.bool)
        keep[:, 1:] = ids[:, 1:] != ids[:, :1]
        values = torch.cat(self._values) if self._values else torch.empty(0, width)
        ranks = torch.cat(self._ranks) if self._ranks else ids
        bad = ~torch.isfinite(values) & keep
        offsets = np.zeros(len(self._prompt) + 1, dtype=np.int32)
        np.cumsum(keep.sum(1).numpy(), out=offsets[2:])
        return (
            PromptLogprobs(
                ids=ids[keep].numpy().astype(np.int32),
                values=values.masked_fill(bad, LOGPROB_FLOOR)[keep].numpy().astype(np.float32),
                ranks=ranks[keep].numpy().astype(np.int32),
                offsets=offsets,
            ),
            int(bad.sum()),
        )
