"""Routed experts of the mock: by weights, adapter, media, token and position, so equal prefixes have equal rows."""

import math

import numpy as np

from rollplane.engines.mock.hashing import mix, stream
from rollplane.protocol.arrays import Int32Array
from rollplane.protocol.artifacts import RoutedExperts, narrow_expert_ids
from rollplane.protocol.info import MoeShape


class Router:
    """Chooses experts. `rows` is a pure function of its arguments."""

    def __init__(self, shape: MoeShape) -> None:
        self.shape = shape
        strides = [s for s in range(1, shape.num_experts) if math.gcd(s, shape.num_experts) == 1]
        self._strides = np.array(strides, dtype=np.int64)

    def __repr__(self) -> str:
        return f"<Router {self.shape.layers} layers, {self.shape.top_k} of {self.shape.num_experts}>"

    def rows(
        self, scope: int, token_ids: Int32Array, *, position: int
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        """Expert ids int64 [len(token_ids), layers, top_k] of tokens at positions from `position` on.

        Ids along top_k are distinct: they step through the experts by a stride coprime to their number. With one expert
        per token it is never expert 0, so that no honest answer looks like a capture that did not run.
        """
        layers, top_k, experts = self.shape.layers, self.shape.top_k, self.shape.num_experts
        at = np.arange(position, position + token_ids.size)
        seeds = stream(scope, at, salt=4) ^ mix(token_ids.astype(np.uint64) + np.uint64(1))
        values = mix(seeds[:, None] + np.arange(1, layers + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
        if top_k == 1:
            return (1 + (values % np.uint64(experts - 1)).astype(np.int64))[:, :, None]
        base = (values % np.uint64(experts)).astype(np.int64)
        stride = self._strides[((values >> np.uint64(32)) % np.uint64(self._strides.size)).astype(np.int64)]
        return (base[:, :, None] + np.arange(top_k) * stride[:, :, None]) % experts

    def capture(
        self, segments: list[tuple[int, int]], prompt: Int32Array, output: Int32Array, *, start: int
    ) -> RoutedExperts:
        """The rows of one choice.

        Args:
            segments: (scope, first output index) of every set of weights that made tokens, in order. The row of a token
                is captured in the step that makes the token after it.
            prompt, output: token ids.
            start: first row wanted.
        """
        if output.size == 0:
            empty = np.empty((0, self.shape.layers, self.shape.top_k), dtype=np.int64)
            return RoutedExperts(array=narrow_expert_ids(empty, num_experts=self.shape.num_experts), start=start)
        forwarded = np.concatenate([prompt, output[:-1]])
        parts = []
        for i, (scope, first) in enumerate(segments):
            begin = max(start, 0 if i == 0 else prompt.size + first - 1)
            end = prompt.size + segments[i + 1][1] - 1 if i + 1 < len(segments) else forwarded.size
            if end > begin:
                parts.append(self.rows(scope, forwarded[begin:end], position=begin))
        rows = np.concatenate(parts) if len(parts) > 1 else parts[0]
        return RoutedExperts(array=narrow_expert_ids(rows, num_experts=self.shape.num_experts), start=start)
