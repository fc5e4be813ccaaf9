"""A policy over an engine that is a fake."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from rollplane.engines.vllm.policy import Policy
from rollplane.protocol.admin import StagedWeights


def policy_over(engine: Any, *, good: StagedWeights | None = None, live: Sequence[Any] = ()) -> Policy:
    """At v0. `good`: the weights that it could load again. `live`: the requests that run."""

    async def resubmit(*_: Any) -> None: ...

    policy = Policy(
        engine,
        SimpleNamespace(DeadError=ConnectionError),  # type: ignore[arg-type]
        version="v0",
        loaded=None,
        tied=False,
        adapters=None,
        isolate=True,
        live=lambda: live,
        resubmit=resubmit,
    )
    policy._good = good
    return policy
