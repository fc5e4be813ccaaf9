"""A member of a fleet as discovery shows it: the worker's own record, its place in the fleet added."""

from rollplane.errors import RollplaneError
from rollplane.protocol.admin import WorkerRecord
from rollplane.rl.members import Member


def record_of(member: Member, found: list[WorkerRecord] | RollplaneError) -> WorkerRecord:
    """The record of a member.

    Args:
        found: what the worker answered when it was asked for its record.

    A worker that does not take requests now has an `error` that says why. One that did not answer is shown by what it
    told last; its state is `failed`.
    """
    record = found[0] if isinstance(found, list) and found else _from_last_state(member)
    # The frontend's way to the worker, where the worker does not say its own address.
    record.system_url = record.system_url or member.url
    record.request_plane_url = record.request_plane_url or member.url
    if member.state != "current" or not member.worker.reachable:
        unreached = f"cannot be reached: {member.worker.trouble}" if member.worker.trouble else "cannot be reached"
        record.error = f"{member.state}: {member.reason or unreached}"
    elif isinstance(found, RollplaneError):
        record.error = f"{member.state}: {found.message}"
    elif member.stall is not None:
        record.error = f"{member.state}: {member.stall}"
    return record


def _from_last_state(member: Member) -> WorkerRecord:
    heard = member.worker.state
    record = WorkerRecord(
        namespace="",
        component="",
        endpoint="rl",
        instance_id="",
        transport={"http": member.url},
        request_plane_url=member.url,
        system_url=member.url,
        model="",
        routes=[],
    )
    if heard is not None:
        record.instance_id = heard.instance
        record.model = heard.info.model
        record.routes = heard.routes
        record.world_size = heard.info.world_size
        record.capabilities = heard.info.capabilities
        record.policy_version = heard.policy_version
        record.policy_digest = heard.policy_digest
        record.adapters = heard.adapters
        record.state = "failed"
    return record
