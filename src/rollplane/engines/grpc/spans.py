"""Which policy version made which token, as far as one call over the wire can know it. Pure."""

from rollplane.protocol.versions import PolicySpan, VersionSpans


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
        self._spans = VersionSpans(version)

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
        return self._spans.read(self.tokens)

    def _change(self, version: str, *, known: bool) -> None:
        self._spans.change(version, made=self.tokens if known else None)
