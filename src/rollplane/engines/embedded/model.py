"""A causal language model from a directory, as the step loop sees it: token ids in, logits and expert choices out.

The model code is Transformers'; what is ours is how it is called: an explicit 4D mask, explicit positions, and a cache
object that the caller owns. Some modules of named families have faster stand-ins (`fast_modules`).
"""

import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rollplane.engines.embedded.families import MoeFamily, moe_family
from rollplane.engines.embedded.fast_modules import install
from rollplane.errors import EngineFailed, InvalidRequest, NotFound

DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""float32 gives the same tokens whoever shares the batch; bfloat16 kernels depend on the batch size."""


class KvCache(Protocol):
    """What a model's attention layers call: keep these keys and values, return all that the queries may see."""

    is_compileable: bool

    def update(self, k: Tensor, v: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """`k`, `v` [batch, kv heads, new tokens, head dim] -> the same with all visible tokens."""
        ...


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes that buffers and validation need; found by running one token, not by trusting the config's names.

    `vocab_tokens` rows of the input embedding; `context_tokens` the longest prompt + completion; `moe_layers`,
    `experts` and `experts_per_token` are 0 for a dense model.
    """

    vocab_tokens: int
    context_tokens: int
    layers: int
    kv_heads: int
    head_dim: int
    moe_layers: int
    experts: int
    experts_per_token: int


@dataclass(frozen=True)
class Forward:
    """One forward's answer: `logits` float32 [rows, positions, vocab]; `routes` [rows, tokens, moe layers, top_k]."""

    logits: Tensor
    routes: Tensor | None


class ExpertTap:
    """Keeps the expert ids of the forward that is running, in layer order.

    The hook sits on the experts module, whose second argument is the router's choice. A forward that reaches fewer
    experts modules than the model has is an error: a kernel that bypasses the hook must not look like a dense model.
    """

    def __init__(self, module: nn.Module) -> None:
        self.modules = [m for name, m in module.named_modules() if name.split(".")[-1] == "experts"]
        self._seen: list[Tensor] = []
        for m in self.modules:
            m.register_forward_pre_hook(self._keep, with_kwargs=True)

    def _keep(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._seen.append(args[1] if len(args) > 1 else kwargs["top_k_index"])

    def clear(self) -> None:
        """Forget what an earlier, perhaps failed, forward left."""
        self._seen.clear()

    def take(self, rows: int, tokens: int) -> Tensor | None:
        """Expert ids [rows, tokens, moe layers, top_k] of the forward that just ended; None for a dense model."""
        if not self.modules:
            return None
        if len(self._seen) != len(self.modules):
            raise EngineFailed(
                f"the expert hook saw {len(self._seen)} of {len(self.modules)} MoE layers: routes would be wrong"
            )
        out = torch.stack(self._seen, dim=1)
        self._seen.clear()
        return out.view(rows, tokens, len(self.modules), -1)


class _Probe:
    """A cache that records the shape of what it is given; with `history`, as if so many tokens came before."""

    is_compileable = False

    def __init__(self, history: int = 0) -> None:
        self.shapes: dict[int, tuple[int, int]] = {}
        self._history = history

    def update(self, k: Tensor, v: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if k.shape != v.shape:
            raise InvalidRequest(f"layer {layer} keeps keys {list(k.shape)} unlike its values {list(v.shape)}")
        self.shapes[layer] = (k.shape[1], k.shape[3])
        earlier = [torch.cat([x.roll(n + 1, dims=-1) for n in range(self._history)] + [x], dim=2) for x in (k, v)]
        return earlier[0], earlier[1]

    def get_seq_length(self, *args: Any) -> int:
        return 0

    def get_mask_sizes(self, query: int, *args: Any) -> tuple[int, int]:
        return query, 0


@dataclass
class CausalModel:
    """A loaded model. Not thread-safe: one thread calls it.

    Args:
        module: the Transformers model, in eval mode.
        family: its MoE family, None for a dense model.
        eos_token_ids: the ids that end a generation by themselves.
        directory: where it was loaded from, None for a model made in memory.
    """

    module: nn.Module
    family: MoeFamily | None
    eos_token_ids: frozenset[int]
    directory: Path | None
    max_context_tokens: int | None = None
    shape: ModelShape = field(init=False)

    def __post_init__(self) -> None:
        config: Any = self.module.config
        self.config: Any = config
        self.dtype: torch.dtype = next(self.module.parameters()).dtype
        self._tap = ExpertTap(self.module)
        names = inspect.signature(self.module.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self.shape = self._probe_shape()
        self.fast = install(self.module, self._probe_logits)

    def _probe_shape(self) -> ModelShape:
        probe = _Probe()
        zero = torch.zeros(1, 1, dtype=torch.long)
        with torch.inference_mode():
            out = self.forward(zero, positions=zero, visible=torch.ones(1, 1, 1, dtype=torch.bool), cache=probe)
        shapes = set(probe.shapes.values())
        if len(shapes) != 1:
            raise InvalidRequest(f"this model's layers keep caches of different shapes {sorted(shapes)}: not supported")
        [(kv_heads, head_dim)] = shapes
        trained = int(self.config.max_position_embeddings)
        context = min(trained, self.max_context_tokens or trained)
        routes = out.routes
        return ModelShape(
            vocab_tokens=int(self.module.get_input_embeddings().weight.shape[0]),  # type: ignore[operator]
            context_tokens=context,
            layers=len(probe.shapes),
            kv_heads=kv_heads,
            head_dim=head_dim,
            moe_layers=0 if routes is None else routes.shape[2],
            experts=0 if routes is None else int(self._tap.modules[0].num_experts),
            experts_per_token=0 if routes is None else routes.shape[3],
        )

    def _probe_logits(self) -> Tensor:
        """Logits [2, vocab] of a decode step of two rows, one of which sees less than the other."""
        history = 2
        visible = torch.ones(2, 1, history + 1, dtype=torch.bool)
        visible[0, 0, 0] = False
        positions = torch.tensor([[history - 1], [history]])
        ids = torch.tensor([[0], [self.shape.vocab_tokens - 1]])
        with torch.inference_mode():
            return self.forward(ids, positions=positions, visible=visible, cache=_Probe(history)).logits[:, 0]

    def forward(
        self,
        ids: Tensor,
        *,
        positions: Tensor,
        visible: Tensor,
        cache: KvCache,
        every_position: bool = False,
        rows: Tensor | None = None,
    ) -> Forward:
        """One forward.

        Args:
            ids: int64 [rows, tokens].
            positions: int64 [rows, tokens], each token's place in its own sequence.
            visible: bool [rows, tokens, keys], what each token may attend to; no row all False. It may end before the
                rows of a `DecodeCache`'s chunks, which say that themselves.
            cache: gets the new keys and values and returns what is visible.
            every_position: logits of every position; else of the last one only.
            rows: int64, the rows that get logits; all if None. For `fast` models only, as are chunks.

        Raises:
            EngineFailed: the expert hook missed an MoE layer.
        """
        self._tap.clear()
        mask = torch.zeros(visible.shape, dtype=self.dtype).masked_fill_(~visible, torch.finfo(self.dtype).min)
        out = self.module(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask[:, None],
            use_cache=True,
            logits_to_keep=0 if every_position else 1,
            **{self._cache_name: cache},
            **({} if rows is None else {"rows": rows}),
        )
        return Forward(out.logits.float(), self._tap.take(*ids.shape))


def load_model(directory: str | Path, *, dtype: str = "float32", max_context_tokens: int | None = None) -> CausalModel:
    """Load a causal language model from a local directory with safetensors weights. Nothing is downloaded or executed.

    Raises:
        NotFound: the directory, its config.json or its safetensors files are missing.
        InvalidRequest: an unknown dtype, or a model that the step loop cannot serve exactly; the message names it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    directory = Path(directory)
    if dtype not in DTYPES:
        raise InvalidRequest(f"dtype must be one of {sorted(DTYPES)}, got {dtype!r}", param="dtype")
    if not (directory / "config.json").is_file():
        raise NotFound(f"{directory} is not a model directory: it has no config.json", param="model")
    if not any(directory.glob("*.safetensors")):
        raise NotFound(f"{directory} has no *.safetensors files; other weight formats are not read", param="model")
    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    family = check_servable(config, max_context_tokens=max_context_tokens)
    try:
        module = AutoModelForCausalLM.from_pretrained(
            directory,
            config=config,
            dtype=DTYPES[dtype],
            attn_implementation="sdpa",
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
        )
    except (ValueError, OSError) as error:
        raise InvalidRequest(f"{directory} could not be loaded as a causal language model: {error}") from error
    return wrap_model(
        module,
        family=family,
        eos_token_ids=read_eos_token_ids(directory, config),
        directory=directory,
        max_context_tokens=max_context_tokens,
    )


def wrap_model(
    module: Any,
    *,
    family: MoeFamily | None,
    eos_token_ids: Sequence[int] | frozenset[int],
    directory: Path | None = None,
    max_context_tokens: int | None = None,
) -> CausalModel:
    """A `CausalModel` over a Transformers model that is already in memory."""
    module.eval()
    module.requires_grad_(False)
    if family is not None:
        module.set_experts_implementation("grouped_mm")
    return CausalModel(module, family, frozenset(eos_token_ids), directory, max_context_tokens)


def check_servable(config: Any, *, max_context_tokens: int | None = None) -> MoeFamily | None:
    """The MoE family (None: dense) of a config that the step loop serves exactly.

    Raises:
        InvalidRequest: encoder-decoder, an unknown MoE family, attention other than full, or latent attention.
    """
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise InvalidRequest(f"model type {kind!r} is an encoder-decoder; only decoders are served", param="model_type")
    family = moe_family(kind, config.to_dict())
    if getattr(config, "kv_lora_rank", None):
        raise InvalidRequest(f"model type {kind!r} uses latent attention, which is not supported", param="model_type")
    others = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    if others:
        raise InvalidRequest(f"model type {kind!r} has layers of type {others}; only full attention is served")
    window = getattr(config, "sliding_window", None)
    context = min(config.max_position_embeddings, max_context_tokens or config.max_position_embeddings)
    if window and getattr(config, "use_sliding_window", True) and window < context:
        raise InvalidRequest(
            f"model type {kind!r} attends to a window of {window} tokens, less than its context of {context}; "
            f"serve it with a context of at most {window} tokens",
            param="max_context_tokens",
        )
    return family


def read_eos_token_ids(directory: Path, config: Any) -> frozenset[int]:
    """The ids that end a generation: generation_config.json's, else the config's. Nothing else is read from there."""
    found = config.eos_token_id if hasattr(config, "eos_token_id") else None
    path = directory / "generation_config.json"
    if path.is_file():
        found = json.loads(path.read_text()).get("eos_token_id", found)
    if found is None:
        return frozenset()
    return frozenset(found if isinstance(found, list) else [found])
