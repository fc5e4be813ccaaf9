"""The trainer's log-probabilities of saved rollouts, and the mismatch figures made of them."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollplane.client.replay import Mismatch, mismatch
from rollplane.client.replay_torch import force_routes, masked_logprobs
from rollplane.demo.models import load_model
from rollplane.demo.rollouts import Rollouts

SETTINGS = {"none": (False, False), "routes": (True, False), "mask": (False, True), "both": (True, True)}
"""What is replayed under each name: (routes, sampling masks)."""


def score(model: Any, rollouts: Rollouts, *, routes: bool, mask: bool) -> Tensor:
    """The model's log-probabilities of the sampled tokens, float32 [N], with gradients, at temperature 1.

    Args:
        model: the trainer's model.
        rollouts: what to score.
        routes: force the recorded experts.
        mask: normalise over the recorded sampling masks.
    """
    ids = torch.from_numpy(rollouts.token_ids[:, :-1]).long()  # nothing follows the last token, so it is not forwarded
    recorded = torch.from_numpy(rollouts.routes[:, :-1])
    with force_routes(model, recorded) if routes else nullcontext():
        logits = model(input_ids=ids, use_cache=False).logits
    choice = torch.from_numpy(rollouts.choice_of_token)
    position = torch.from_numpy(rollouts.position_of_token)
    return masked_logprobs(
        logits[choice, position - 1],
        torch.from_numpy(rollouts.sampled),
        ids=torch.from_numpy(rollouts.mask_ids) if mask else None,
        offsets=torch.from_numpy(rollouts.mask_offsets) if mask else None,
    )


def measure(model: Any, rollouts: Rollouts, *, setting: str = "both", version: str | None = None) -> Mismatch:
    """The mismatch of a model against rollouts.

    Args:
        model: the trainer's model with the weights to compare.
        rollouts: what the engine sampled.
        setting: a key of `SETTINGS`.
        version: only tokens of this policy version; None takes all.
    """
    routes, mask = SETTINGS[setting]
    with torch.no_grad():
        ours = score(model, rollouts, routes=routes, mask=mask).numpy()
    where = None if version is None else rollouts.version_of_token == version
    return mismatch(ours, rollouts.logprobs, where=where)


def mismatch_kl(model: Any, rollouts: Rollouts, *, version: str | None = None) -> dict[str, float]:
    """The mismatch KL under every key of `SETTINGS`, in nats."""
    return {name: measure(model, rollouts, setting=name, version=version).kl for name in SETTINGS}


def pooled_kl(parts: list[Mismatch]) -> float:
    """The mismatch KL over the tokens of several measurements."""
    tokens = np.array([part.tokens for part in parts], dtype=np.float64)
    return float((tokens * [part.kl for part in parts]).sum() / tokens.sum())


def in_flight_figures(rollouts: Rollouts, policies: dict[str, Any]) -> dict[str, Any]:
    """What an update that arrived during a rollout did to it.

    Every token is compared with the weights of its own version. Tokens after a boundary inside an answer were sampled
    over keys and values of the older weights (the update kept them), which no trainer recomputes: their figure stands
    apart, and is not a replay error.

    Args:
        rollouts: of one step.
        policies: per version, a model or the directory of its checkpoint.

    Returns:
        `mixed_answers` and, per version, `tokens`, `kl` of tokens wholly under that version, and `kl_after_boundary`;
        a figure is None where there are no such tokens.
    """
    made_by = rollouts.version_of_token
    first_of_choice = made_by[np.searchsorted(rollouts.choice_of_token, rollouts.choice_of_token)]
    after = made_by != first_of_choice
    found: dict[str, Any] = {"mixed_answers": int(sum(len(spans) > 1 for spans in rollouts.versions)), "versions": {}}
    for version, policy in policies.items():
        model = load_model(policy) if isinstance(policy, Path) else policy
        with torch.no_grad():
            ours = score(model, rollouts, routes=True, mask=True).numpy()
        own = made_by == version
        found["versions"][version] = {
            "tokens": int(own.sum()),
            "kl": _kl(ours, rollouts, own & ~after),
            "kl_after_boundary": _kl(ours, rollouts, own & after),
        }
    return found


def _kl(ours: NDArray[Any], rollouts: Rollouts, where: NDArray[np.bool_]) -> float | None:
    return mismatch(ours, rollouts.logprobs, where=where).kl if where.any() else None
