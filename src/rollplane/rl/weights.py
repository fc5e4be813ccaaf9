"""Weights of one worker's policy, whole and at once: stage while tokens are made, then pause, apply, verify, resume.

The states, and what else moves along them, are in `rl.policy_table`.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from rollplane.errors import Conflict, EngineFailed
from rollplane.protocol.admin import AllowTensors, FlushReport, PauseMode, StagedWeights, UpdateReport
from rollplane.protocol.versions import check_version_name
from rollplane.rl.base import Operation
from rollplane.rl.policy_table import TRANSITIONS as TRANSITIONS  # states come with what moves along them
from rollplane.rl.policy_table import PolicyState as PolicyState
from rollplane.rl.policy_table import PolicyTable

_LOG: Final = logging.getLogger(__name__)


class PolicyControl(PolicyTable):
    """Owns the life of one worker's policy over a `WeightReceiver`; see `PolicyTable` for its arguments."""

    async def stage(
        self, path: str, *, allow_tensors: Sequence[AllowTensors] = (), operation: Operation | None = None
    ) -> StagedWeights:
        """Read and check a checkpoint while tokens are made; kept until an update uses or replaces it."""

        async def work() -> StagedWeights:
            staged = await self._read(path, allow_tensors)
            self._staged = {path: staged}
            return _told(staged)

        arguments = ("stage", path, tuple(allow_tensors))
        return await self.operations.run(operation, arguments, work, what="weight staging")

    async def _read(self, path: str, allow_tensors: Sequence[AllowTensors]) -> StagedWeights:
        staged = await self.receiver.stage_weights(path, allow_tensors=allow_tensors)
        if staged.ignored is not None:
            _LOG.warning("checkpoint %s is not the model's in all tensors, as was allowed: %s", path, staged.ignored)
        return staged

    async def update_from_disk(
        self,
        path: str,
        *,
        version: str | None = None,
        mode: PauseMode = "keep",
        clear_cache: bool = False,
        expected_digest: str | None = None,
        allow_tensors: Sequence[AllowTensors] = (),
        operation: Operation | None = None,
    ) -> UpdateReport:
        """Replace the weights by a checkpoint directory; see `PolicyAdmin.update_from_disk`.

        Args:
            expected_digest: refuse other contents than were staged.
        """
        name = check_version_name(version if version is not None else Path(path).name, param="weight_version")

        async def stage() -> StagedWeights:
            staged = self._staged.pop(path, None)
            if staged is None or staged.digest != expected_digest:
                # Only a digest says that the files are still the ones that were staged.
                staged = await self._read(path, allow_tensors)
            return staged

        async def work() -> UpdateReport:
            return await self.update_from(
                stage, version=name, mode=mode, clear_cache=clear_cache, expected_digest=expected_digest
            )

        arguments = ("update", path, name, mode, clear_cache, expected_digest, tuple(allow_tensors))
        return await self.operations.run(operation, arguments, work, what="weight update")

    async def stage_from(
        self,
        source: str,
        stage: Callable[[], Awaitable[StagedWeights]],
        *,
        arguments: Any,
        operation: Operation | None = None,
    ) -> StagedWeights:
        """Stage weights of another source than a directory; kept until an update uses or replaces them."""

        async def work() -> StagedWeights:
            async with self._updates:
                staged = await stage()
            self._staged = {source: staged}
            return _told(staged)

        return await self.operations.run(operation, arguments, work, what="weight staging")

    async def apply_staged(
        self,
        digest: str,
        *,
        version: str,
        mode: PauseMode = "keep",
        clear_cache: bool = False,
        operation: Operation | None = None,
    ) -> UpdateReport:
        """Put weights in place that were staged before, by their digest; see `update_from`.

        Raises:
            Conflict: no staged weights have this digest.
        """
        check_version_name(version, param="weight_version")

        async def stage() -> StagedWeights:
            for staged in self._staged.values():
                if staged.digest == digest:
                    return staged
            known = [staged.digest for staged in self._staged.values()]
            raise Conflict(
                f"no staged weights have the digest {digest[:16]}...; stage them first",
                param="digest",
                details={"staged": known},
            )

        async def work() -> UpdateReport:
            if digest == self.digest and version == self.version and self._state != "failed":
                return UpdateReport(
                    policy_version=version, previous_version=version, digest=digest, tensors=0, bytes=0, applied=False
                )
            return await self.update_from(stage, version=version, mode=mode, clear_cache=clear_cache)

        return await self.operations.run(
            operation, ("apply", digest, version, mode, clear_cache), work, what="weight update"
        )

    async def update_from(
        self,
        stage: Callable[[], Awaitable[StagedWeights]],
        *,
        version: str,
        mode: PauseMode = "keep",
        clear_cache: bool = False,
        expected_digest: str | None = None,
    ) -> UpdateReport:
        """Stage, then pause, apply, verify and resume. While it stages, tokens are made and `resume` answers.

        Raises:
            Conflict: the staged contents are not the expected ones; nothing changed.
        """
        async with self._updates:
            self._must_be_closed()
            self._must_be_awake()
            began = self._clock()
            staged = await stage()
            if expected_digest is not None and staged.digest != expected_digest:
                raise Conflict(
                    f"the weights' digest is {staged.digest[:16]}..., expected {expected_digest[:16]}...",
                    param="expected_digest",
                    details={"digest": staged.digest},
                )
            stage_s = self._clock() - began
            async with self._lock:
                report = await self._update(staged, version, mode=mode, clear_cache=clear_cache)
            report.stage_s = stage_s
            return report

    async def set_version(self, version: str) -> None:
        """Change the label only; aborts nothing.

        Raises:
            Conflict: an update is under way.
        """
        check_version_name(version, param="weight_version")
        async with self._lock:
            self._must_be_closed()
            changes = version != self.version
            await self.receiver.set_policy_version(version)
            self.sequence.advance(version)
            if changes:
                self.scope.renew(version)
            self._on_change()

    async def flush(self, *, preempt: bool = False) -> FlushReport:
        """Drop caches that no running request holds."""
        return await self.receiver.flush_cache(preempt=preempt)

    async def close(self) -> None:
        """Cancel operations that run."""
        await self.operations.close()

    async def _update(self, staged: StagedWeights, version: str, *, mode: PauseMode, clear_cache: bool) -> UpdateReport:
        previous = self.version
        report = UpdateReport(
            policy_version=version,
            previous_version=previous,
            digest=staged.digest,
            tensors=staged.tensors,
            bytes=staged.bytes,
            ignored=staged.ignored,
        )
        if staged.digest == self.digest and version == previous and self._state != "failed":
            report.applied = False
            return report
        was_paused = self._state in ("paused", "failed")
        stopped = self._clock()
        try:
            if self._state != "failed":
                await self._pause_for_update(mode, clear_cache=clear_cache)
            await self._apply(staged, version)
        finally:
            # A caller that asked for a pause meanwhile keeps it.
            if not was_paused and self._state == "paused" and not (self.paused_by_caller or self._callers_pausing):
                await self._run_again()
        report.pause_s = self._clock() - stopped
        return report

    async def _apply(self, staged: StagedWeights, version: str) -> None:
        """From paused or failed to paused with the new weights, or raise in a state that tells what is in place."""
        came_from = self._state
        self._enter("receiving")
        try:
            await self.receiver.apply_weights(staged, version=version)
            self._enter("verifying")
            self._verify(version)
        except EngineFailed:
            # Refused: the old weights are as they were.
            self._enter("failed" if came_from == "failed" or self._state == "verifying" else "paused")
            raise
        except BaseException:
            self._enter("failed")
            raise
        self._took(version, digest=staged.digest, ignored=staged.ignored)


def _told(staged: StagedWeights) -> StagedWeights:
    """What a caller gets and operations remember: without the engine's handle, which would keep a whole copy of the weights."""
    return msgspec.structs.replace(staged, handle=None)
