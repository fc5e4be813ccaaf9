"""Who receives weights: world sizes and rank offsets. Pure; refuses a topology it would have to guess about."""

from collections.abc import Sequence

import msgspec

from rollplane.errors import InvalidRequest


class Parallelism(msgspec.Struct, frozen=True, kw_only=True):
    """How one worker's engine is cut up. `external_launcher`: its ranks were started by somebody else."""

    tensor: int = 1
    pipeline: int = 1
    prefill_context: int = 1
    data: int = 1
    external_launcher: bool = False


def receivers(parallelism: Parallelism) -> int:
    """How many ranks of a worker receive weights: TP x PP x prefill-context.

    Raises:
        InvalidRequest: data parallelism or the external launcher, where any count would be a guess.
    """
    for name in ("tensor", "pipeline", "prefill_context", "data"):
        size = getattr(parallelism, name)
        if size < 1:
            raise InvalidRequest(f"parallelism.{name} must be >= 1, got {size}", param=f"parallelism.{name}")
    if parallelism.external_launcher:
        raise InvalidRequest(
            "weight transfer is refused for engines under the external launcher: their ranks are not this worker's to count",
            param="parallelism.external_launcher",
        )
    if parallelism.data > 1:
        raise InvalidRequest(
            f"weight transfer is refused for data parallelism {parallelism.data}: run one worker per replica instead",
            param="parallelism.data",
        )
    return parallelism.tensor * parallelism.pipeline * parallelism.prefill_context


def rank_offsets(world_sizes: Sequence[int]) -> list[int]:
    """The first receiver rank of each worker in one group: contiguous, the trainer is rank 0 and not counted here.

    Worker `i`'s ranks are `1 + offset .. offset + size`, so the group's world size is `1 + sum(world_sizes)`.

    Raises:
        InvalidRequest: a size below 1.
    """
    offsets, at = [], 0
    for i, size in enumerate(world_sizes):
        if size < 1:
            raise InvalidRequest(f"world_sizes[{i}] must be >= 1, got {size}", param=f"world_sizes[{i}]")
        offsets.append(at)
        at += size
    return offsets
