"""A fleet whose control owner is another process of the same server: it is followed, never commanded.

The owner tells what it holds of the fleet and where each worker stands; the workers tell for themselves what they have. A
worker takes requests here while the owner says that it is current and its own word is of the fleet's policy.
"""

import msgspec

from rollplane.rl.control_record import ControlRecord
from rollplane.rl.fleet import Fleet
from rollplane.rl.members import Member, MemberState
from rollplane.rl.roster import FleetSettings


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a worker stands; see `Member`."""

    state: MemberState
    reason: str | None = None
    foreign: bool = False


class FleetView(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet as its owner sees it. `places`: by the worker's address; `held_for`: why nothing may be placed."""

    kept: ControlRecord
    changing_adapters: list[str]
    held_for: str | None
    places: dict[str, Place]


def view_of(fleet: Fleet) -> FleetView:
    """What the followers of a fleet must know of it now."""
    return FleetView(
        kept=fleet.kept(),
        changing_adapters=sorted(fleet.changing_adapters),
        held_for=fleet.held_for,
        places={m.url: Place(state=m.state, reason=m.reason, foreign=m.foreign) for m in fleet.members},
    )


class FollowedFleet(Fleet):
    """The workers of one model as another process's fleet; its administration is there."""

    def __init__(self, *, settings: FleetSettings | None = None) -> None:
        super().__init__(settings=settings, epoch=0)
        self._places: dict[str, Place] = {}

    def take(self, view: FleetView) -> None:
        """Follow the owner's newest view."""
        kept = view.kept
        self.epoch, self.checkpoint, self.paused = kept.epoch, kept.checkpoint, kept.paused
        self.adapter_paths, self.changing_adapters = dict(kept.adapters), set(view.changing_adapters)
        if kept.versions != self._versions:
            self._versions, self.sequence = [], None
            for version in kept.versions:
                self._advance(version)
        self._closed_gates = [] if view.held_for is None else [view.held_for]
        self._places = view.places
        for member in self.members:
            self._review(member)
        self._tell()

    def _review(self, member: Member) -> None:
        """Where a worker stands, by the owner's word and its own."""
        heard, place = member.worker.state, self._places.get(member.url)
        if member.state != "gone" and heard is not None:
            if member.instance != heard.instance:
                if member.instance is not None:
                    member.worker.drop_requests(f"worker {member.url} was restarted")
                member.instance = heard.instance
            wanted, reason = ("joining", "not told of yet") if place is None else (place.state, place.reason)
            if wanted == "current" and not self._has_target(member):
                wanted, reason = "joining", f"has {member.version!r}, the fleet {self.version!r}"
            member.foreign = place is not None and place.foreign
            self._enter(member, wanted, reason)
        self._tell()

    @staticmethod
    def _enter(member: Member, wanted: MemberState, reason: str | None) -> None:
        if wanted == "gone":
            return  # this process's own discovery says who is there
        if member.state == "fenced" and wanted == "current":
            member.enter("joining")
        member.enter(wanted, reason)
