"""Which policy version made which token, as far as one call over the wire can know it. Pure."""

from rollplane.protocol.versions import PolicySpan


class SpanTracker:
    """The spans of one choice.

    Args:
        version: the version that is in place when the call is sent.
        exact: whether tokens are counted as they come (the streaming call). A unary call is not counted, and a change
            during its life leaves the boundary unknown.
        born_paused: the engine was paused when the call was sent, so nothing is made before it resumes (`idle`).
    """

    def __init__(self, version: str, *, exact: bool, born_paused: bool = False) -> None:
        self.tokens = 0
        self.exact = exact
        self.idle = born_paused
        self._spans: list[PolicySpan] = [(version, 0)]

    def __repr__(self) -> str:
        return f"<SpanTracker {self._spans} at {self.tokens}>"

    def resumed(self, version: str) -> None:
        """The engine resumes with `version`, and every token made before the pause has been counted."""
        self._change(version, known=self.exact or self.idle)
        self.idle = False

    def relabelled(self, version: str) -> None:
        """The version changed while tokens are being made: where, nobody can say."""
        self._change(version, known=False)

    def spans(self) -> list[PolicySpan]:
        """The spans of a finished choice; a version that made no token of it is left out."""
        found = [(name, first) for name, first in self._spans if first is None or first < max(self.tokens, 1)]
        merged: list[PolicySpan] = []
        for name, first in found:
            if not merged or merged[-1][0] != name:
                merged.append((name, first))
        return merged

    def _change(self, version: str, *, known: bool) -> None:
        if self._spans[-1][0] == version:
            return
        if not known:
            self._spans.append((version, None))
            return
        while self._spans and self._spans[-1][1] == self.tokens:
            self._spans.pop()
        self._spans.append((version, self.tokens))
