"""Policy versions: opaque names chosen by the trainer, and the spans that say which version made which token."""

from rollplane.errors import EngineProtocolError, InvalidRequest

PolicySpan = tuple[str, int | None]
"""(version, first output index). None: the boundary is unknown (a unary call that lived through an update)."""

MAX_VERSION_CHARS = 256


def check_version_name(version: object, *, param: str) -> str:
    """The version name, if it is one.

    Raises:
        InvalidRequest: not a string of 1 to 256 printable characters.
    """
    if not isinstance(version, str) or not 1 <= len(version) <= MAX_VERSION_CHARS or not version.isprintable():
        kind = type(version).__name__ if not isinstance(version, str) else f"string of {len(version)} characters"
        raise InvalidRequest(
            f"{param} must be a printable string of 1 to {MAX_VERSION_CHARS} characters, got {kind}", param=param
        )
    return version


class VersionSpans:
    """Which policy version makes which tokens of one choice, as it changes under way."""

    def __init__(self, version: str) -> None:
        self._spans: list[PolicySpan] = [(version, 0)]

    def __repr__(self) -> str:
        return f"<VersionSpans {self._spans}>"

    def change(self, version: str, *, made: int | None) -> None:
        """Tokens from now on are `version`'s. `made`: how many there are; None: nobody knows, and so says the span."""
        if made is not None:
            self._spans = self._below(made)
        if not self._spans or self._spans[-1][0] != version:
            self._spans.append((version, made))

    def read(self, tokens: int) -> list[PolicySpan]:
        """The spans of a choice of `tokens` tokens; a version that made no token of it is left out."""
        return self._below(max(tokens, 1))

    def _below(self, tokens: int) -> list[PolicySpan]:
        """Without the first span that starts at `tokens` or later, and what follows it: no token was made under those."""
        kept: list[PolicySpan] = []
        for version, first in self._spans:
            if first is not None and first >= tokens:
                break
            kept.append((version, first))
        return kept


def check_spans(spans: list[PolicySpan], *, tokens: int) -> None:
    """Spans start at 0, rise strictly, stay inside the output, and name neighbouring versions that differ.

    Raises:
        EngineProtocolError: with the spans and the token count.
    """
    if not spans:
        raise EngineProtocolError(f"policy_versions is empty for a choice of {tokens} tokens")
    if spans[0][1] != 0:
        raise EngineProtocolError(f"policy_versions {spans} do not start at output index 0")
    last = -1
    for i, (version, first) in enumerate(spans):
        if i and version == spans[i - 1][0]:
            raise EngineProtocolError(f"policy_versions {spans} name {version!r} twice in a row")
        if first is None:
            continue
        if first <= last:
            raise EngineProtocolError(f"policy_versions {spans} do not rise")
        if first >= max(tokens, 1):
            raise EngineProtocolError(f"policy_versions {spans} start past the {tokens} tokens of the choice")
        last = first


def version_of_token(spans: list[PolicySpan], index: int) -> str | None:
    """The version that made output token `index`; None where the boundary is unknown."""
    found: str | None = None
    for version, first in spans:
        if first is None:
            return None
        if first <= index:
            found = version
    return found
