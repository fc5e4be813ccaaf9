"""Replay inside a trainer's forward pass: recorded routes for Transformers MoE models, masked log-probabilities.

    with force_routes(model, routes):
        logits = model(input_ids).logits
        loss(logits).backward()  # inside, so that gradient checkpointing replays too

The models are those of Transformers 5 whose router is listed in the model's recorded outputs and picks experts with
`torch.topk`. Shapes use the letters of `rollplane.client.replay`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rollplane.client.replay import UNRECORDED, ReplayError

__all__ = ["UNSUPPORTED_FAMILIES", "force_routes", "masked_logprobs", "moe_routers"]

UNSUPPORTED_FAMILIES = {
    "jetmoe": "attention and feed-forward share one kind of router, and its experts take no expert ids to record",
    "llama4": "its experts see every token, weighted by a score, and take no expert ids to record",
    "phimoe": "its router picks experts by masked argmax, not by torch.topk",
}
"""Model families (`config.model_type`) that cannot replay routes, and why."""


@contextmanager
def force_routes(model: nn.Module, routes: Tensor) -> Iterator[None]:
    """Make every MoE router of a model choose the recorded experts.

    Inside the context each router's top-k returns the recorded ids with the values gathered from its current scores:
    gate weights are computed as ever, with gradients, for the experts that the rollout used. Keep it open through
    `backward()` where gradient checkpointing runs routers again. The model is as before afterwards.

    Args:
        model: a Transformers 5 MoE model, or a wrapper that holds one.
        routes: expert ids, integer [B, S, L, K] for forward passes over B x S tokens (see
            `rollplane.client.replay.pad_routes`); rows of `UNRECORDED` route naturally.

    Raises:
        ReplayError: a family that cannot replay, a model without routers, routes of a wrong type, shape or range, a
            row recorded in part, a forward pass over another number of tokens, a router that never called `torch.topk`
            over its experts, or a context in which a router never ran.
    """
    routers = moe_routers(model)
    experts, top_k = _router_widths(model)
    recorded = _checked_routes(routes, layers=len(routers), experts=experts, top_k=top_k)
    ran = [False] * len(routers)

    def wrap(layer: int, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def replayed(*args: Any, **kwargs: Any) -> Any:
            mode = _ForcedTopK(recorded[:, layer], experts, router=name)
            with mode:
                output = forward(*args, **kwargs)
            if not mode.hits:
                raise ReplayError(f"router {name!r} did not call torch.topk over its {experts} experts: cannot replay")
            ran[layer] = True
            return output

        return replayed

    saved = [router.__dict__.get("forward") for _, router in routers]
    try:
        for layer, (name, router) in enumerate(routers):
            router.forward = wrap(layer, name, router.forward)
        yield
    finally:
        for (_, router), forward in zip(routers, saved, strict=True):
            if forward is None:
                router.__dict__.pop("forward", None)
            else:
                router.forward = forward
    if not all(ran):
        missed = [name for (name, _), hit in zip(routers, ran, strict=True) if not hit]
        raise ReplayError(f"{len(missed)} of {len(routers)} routers never ran with recorded routes: {missed[:3]}")


def moe_routers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The routers of a Transformers 5 model by qualified name, in the model's order (one per MoE layer).

    They are the modules that the model's classes list as the source of `router_logits` in `_can_record_outputs`.

    Raises:
        ReplayError: a family of `UNSUPPORTED_FAMILIES`, or no router.
    """
    family = _config(model).model_type
    for unsupported, reason in UNSUPPORTED_FAMILIES.items():
        if family.startswith(unsupported):
            raise ReplayError(f"model family {family!r} cannot replay routes: {reason}")
    classes: set[type[nn.Module]] = set()
    for module in model.modules():
        recorder = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
        target = getattr(recorder, "target_class", recorder)
        if isinstance(target, type):
            classes.add(target)
    kinds = tuple(classes)
    routers: list[tuple[str, nn.Module]] = [(name, m) for name, m in model.named_modules() if isinstance(m, kinds)]
    if not routers:
        raise ReplayError(f"model family {family!r} records no router_logits: it has no router to replay")
    return routers


def masked_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    *,
    ids: Tensor | None = None,
    offsets: Tensor | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Log-probabilities of the sampled tokens, normalised over their sampling masks, with gradients.

    Gathers the N kept logits instead of masking [T, V]: with a large vocabulary that saves most of the memory.

    Args:
        logits: floating [T, V], before temperature.
        token_ids: the sampled ids, integer [T].
        ids: mask ids, integer [N]; with `offsets`. None: the whole vocabulary.
        offsets: integer [T + 1].
        temperature: of the rollout, above 0.

    Returns:
        [T], float32, or float64 for float64 logits.

    Raises:
        ReplayError: shapes that do not fit, or only one of `ids` and `offsets`.
    """
    if logits.ndim != 2 or token_ids.shape != logits.shape[:1]:
        raise ReplayError(f"logits {list(logits.shape)} and token_ids {list(token_ids.shape)}; must be [T, V] and [T]")
    if not temperature > 0:
        raise ReplayError(f"temperature must be above 0, got {temperature}")
    if (ids is None) != (offsets is None):
        raise ReplayError("a sampling mask needs both ids and offsets")
    scaled = (logits if logits.dtype == torch.float64 else logits.float()) / temperature
    sampled = scaled.gather(1, token_ids.long()[:, None])[:, 0]
    if ids is None or offsets is None:
        return sampled - scaled.logsumexp(-1)
    if offsets.shape != (len(token_ids) + 1,) or int(offsets[-1]) != len(ids):
        raise ReplayError(f"mask offsets {list(offsets.shape)} ending at {int(offsets[-1])} for {len(ids)} ids")
    counts = offsets.long().diff()
    if counts.numel() and int(counts.min()) < 1:
        raise ReplayError(f"sampling mask row {int(counts.argmin())} is empty")
    rows = torch.repeat_interleave(torch.arange(len(token_ids), device=logits.device), counts.to(logits.device))
    kept = scaled[rows, ids.long()]
    peak = torch.full_like(sampled, -torch.inf).scatter_reduce(0, rows, kept.detach(), "amax")
    mass = torch.zeros_like(sampled).scatter_add(0, rows, (kept - peak[rows]).exp())
    return sampled - peak - mass.log()


class _ForcedTopK(TorchFunctionMode):
    """While active, `torch.topk` over the expert axis returns recorded ids [tokens, K] and the scores at them."""

    def __init__(self, recorded: Tensor, experts: int, *, router: str) -> None:
        super().__init__()
        self.recorded = recorded
        self.experts = experts
        self.router = router
        self.hits = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.topk, torch.Tensor.topk):
            return func(*args, **kwargs)
        scores: Tensor = args[0] if args else kwargs["input"]
        k = args[1] if len(args) > 1 else kwargs["k"]
        natural = func(*args, **kwargs)
        # Group-limited routers also rank groups; only the choice among all experts is the recorded one.
        if scores.shape[-1] != self.experts or k != self.recorded.shape[-1]:
            return natural
        tokens = scores.numel() // self.experts
        if tokens != len(self.recorded):
            raise ReplayError(f"router {self.router!r} got {tokens} tokens; the routes are for {len(self.recorded)}")
        self.hits += 1
        own = natural[1].reshape(tokens, k)
        chosen = torch.where(self.recorded == UNRECORDED, own, self.recorded.to(own.device)).view_as(natural[1])
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))


def _config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise ReplayError(f"{type(model).__name__} has no Transformers config: its routers are unknown")
    return config.get_text_config()


def _router_widths(model: nn.Module) -> tuple[int, int]:
    """Experts per layer and experts chosen per token, from the model's config."""
    config = _config(model)
    experts = _first(config, ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"))
    top_k = _first(config, ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_k", "moe_topk"))
    return experts, top_k


def _first(config: Any, names: tuple[str, ...]) -> int:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    raise ReplayError(f"{type(config).__name__} has none of {', '.join(names)}")


def _checked_routes(routes: Tensor, *, layers: int, experts: int, top_k: int) -> Tensor:
    """The routes as int64 [B * S, L, K]."""
    if routes.is_floating_point() or routes.is_complex() or routes.dtype == torch.bool:
        raise ReplayError(f"routes are {routes.dtype}; must be integers")
    if routes.ndim != 4 or routes.shape[2:] != (layers, top_k):
        raise ReplayError(f"routes have shape {list(routes.shape)}; must be [batch, tokens, {layers}, {top_k}]")
    recorded = routes.long().flatten(0, 1)
    if recorded.numel():
        low, high = int(recorded.min()), int(recorded.max())
        if low < UNRECORDED or high >= experts:
            raise ReplayError(f"expert ids range from {low} to {high}; must be {UNRECORDED} or 0..{experts - 1}")
        missing = recorded == UNRECORDED
        if bool((missing.any(-1) != missing.all(-1)).any()):
            raise ReplayError(f"a row mixes recorded experts and {UNRECORDED}: it must be one or the other")
        ordered = recorded.sort(-1).values
        if bool(((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != UNRECORDED)).any()):
            raise ReplayError("a row names one expert twice")
    return recorded
