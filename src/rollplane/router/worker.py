"""The router's record of one worker: its place in the fleet, its load and its circuit."""

from rollplane.rl.members import Member
from rollplane.router.health import Circuit
from rollplane.router.pace import Pace


class RoutedWorker:
    """One worker as routing sees it. Counts are of what this router placed and has not ended."""

    def __init__(self, member: Member, *, circuit: Circuit | None = None) -> None:
        self.member = member
        self.circuit = circuit or Circuit()
        self.pace = Pace()
        self.sequences = 0
        """Choices in flight."""
        self.tokens = 0
        """Prompt tokens of the requests in flight."""

    def __repr__(self) -> str:
        return (
            f"<RoutedWorker {self.url} {self.member.state} {self.version or '?'} circuit={self.circuit.state} "
            f"load={self.load}/{self.tokens}t>"
        )

    @property
    def url(self) -> str:
        """The worker's address."""
        return self.member.url

    @property
    def version(self) -> str | None:
        """The policy version it last told."""
        return self.member.version

    @property
    def load(self) -> int:
        """Sequences it works on: ours at once, others' as it last told."""
        heard = self.member.worker.state
        told = 0 if heard is None else heard.health.running + heard.health.waiting
        return max(self.sequences, told)

    def place(self, *, sequences: int, tokens: int) -> None:
        """Count a request before it is sent, so that the next choice sees it."""
        self.sequences += sequences
        self.tokens += tokens
        self.circuit.sent()

    def release(self, *, sequences: int, tokens: int) -> None:
        """The request has ended, in whatever way."""
        self.sequences -= sequences
        self.tokens -= tokens

    def has_adapter(self, name: str) -> bool:
        """Whether a generation of the adapter takes requests there."""
        heard = self.member.worker.state
        return heard is not None and any(a.name == name and a.state == "ready" for a in heard.adapters)


class Candidates(tuple[RoutedWorker, ...]):
    """Workers that may serve a request, of a moment: the same object again says that none of them has told anything since."""

    __slots__ = ()
