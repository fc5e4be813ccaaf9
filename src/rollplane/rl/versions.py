"""The order of policy versions: names are opaque, their order is the order in which this owner made them current."""

from rollplane.errors import PreconditionFailed
from rollplane.protocol.request import GenerateRequest

MAX_REMEMBERED = 4096


class VersionSequence:
    """Sequence numbers of version names. A name that becomes current again gets a new number."""

    def __init__(self, current: str) -> None:
        self._numbers: dict[str, int] = {current: 0}
        self._current = current
        self._next = 1

    def __repr__(self) -> str:
        return f"<VersionSequence {self._current!r} is number {self._numbers[self._current]}>"

    @property
    def current(self) -> str:
        """The newest version."""
        return self._current

    def number(self, version: str) -> int | None:
        """The sequence number of a version; None for a name never seen (or long forgotten)."""
        return self._numbers.get(version)

    def advance(self, version: str) -> int:
        """Make a version current; its sequence number. The same version again keeps its number."""
        if version != self._current:
            self._numbers.pop(version, None)
            self._numbers[version] = self._next
            self._current = version
            self._next += 1
            while len(self._numbers) > MAX_REMEMBERED:
                del self._numbers[next(iter(self._numbers))]
        return self._numbers[version]

    def lag(self, version: str) -> int | None:
        """How many numbers a version is behind the newest; None for one that has none."""
        number = self.number(version)
        return None if number is None else self._numbers[self._current] - number

    def at_least(self, version: str, wanted: str) -> bool:
        """Whether `version` is `wanted` or came after it. An unknown `wanted` has not happened yet: False."""
        have, need = self.number(version), self.number(wanted)
        return version == wanted or (have is not None and need is not None and have >= need)


def check_version_wanted(request: GenerateRequest, current: str, sequence: VersionSequence) -> None:
    """Hold a worker's current version against what a request demands.

    Raises:
        PreconditionFailed: naming what was asked for and what exists.
    """
    options = request.options
    exact = request.expects_policy_version or options.policy_version
    if exact is not None and exact != current:
        raise PreconditionFailed(
            f"policy version {exact!r} was asked for, this worker has {current!r}",
            param="rollplane.policy_version",
            details={"policy_version": current},
        )
    least = options.min_policy_version
    if least is not None and not sequence.at_least(current, least):
        raise PreconditionFailed(
            f"policy version {least!r} or later was asked for, this worker has {current!r}",
            param="rollplane.min_policy_version",
            details={"policy_version": current},
        )
