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
