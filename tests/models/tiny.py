"""Tiny random checkpoints that transformers, vLLM and vLLM's Rust server load like any other.

Every function writes one directory in the Hugging Face layout and returns its path. One seed and one dtype give one set
of weights, whatever the caller did to torch's random state before. All models share one tokenizer of 1024 ids.

| function        | architecture                       | parameters |
|-----------------|------------------------------------|------------|
| `make_dense`    | Qwen3ForCausalLM                   | 0.9 M      |
| `make_moe`      | Qwen3MoeForCausalLM, 8 experts     | 1.3 M      |
| `make_mixtral`  | MixtralForCausalLM, 8 experts      | 1.3 M      |
| `make_vl`       | Qwen2_5_VLForConditionalGeneration | 0.8 M      |
| `make_lora`     | a PEFT adapter of one of them      |            |

Weights have a standard deviation of 0.1: logits then have one of about 1.1 and the best two lie about 0.3 apart, so
that sampling has real choices, greedy decoding rarely hangs on rounding, and two seeds do not agree by accident.
"""

import functools
import hashlib
import importlib.metadata
import json
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY = 1024
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
PAD_ID, IM_START_ID, EOS_ID, VISION_START_ID, VISION_END_ID, IMAGE_PAD_ID, VIDEO_PAD_ID = range(len(SPECIAL_TOKENS))

WEIGHT_STD = 0.1
CORPUS_FILES = 40
CORPUS_FILE_CHARACTERS = 40_000
PATCH_PIXELS = 14
MERGED_PIXELS = 28  # one placeholder token covers 28 x 28 pixels: a 56 x 56 image is 4 tokens

CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content -%}
{% if part.type == 'text' %}{{ part.text }}{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor -%}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""


def make_dense(path: str | Path, *, seed: int = 0, dtype: str = "float32", layers: int = 4, **config: Any) -> Path:
    """A Qwen3 decoder: hidden 128, 4 query and 2 key-value heads of 32, context 4096. `config` overrides any field."""
    fields = _decoder_fields(layers) | {"head_dim": 32} | config
    return _write(path, lambda: Qwen3ForCausalLM(Qwen3Config(**fields)), seed=seed, dtype=dtype)


def make_moe(
    path: str | Path,
    *,
    seed: int = 0,
    dtype: str = "float32",
    layers: int = 4,
    experts: int = 8,
    experts_per_token: int = 2,
    **config: Any,
) -> Path:
    """A Qwen3 decoder, a mixture in every layer: routed experts have the shape [tokens, layers, experts_per_token]."""
    fields = _decoder_fields(layers) | {
        "head_dim": 32,
        "moe_intermediate_size": 64,
        "num_experts": experts,
        "num_experts_per_tok": experts_per_token,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return _write(path, lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**fields | config)), seed=seed, dtype=dtype)


def make_mixtral(
    path: str | Path,
    *,
    seed: int = 0,
    dtype: str = "float32",
    layers: int = 4,
    experts: int = 8,
    experts_per_token: int = 2,
    **config: Any,
) -> Path:
    """A Mixtral decoder: another mixture, with other weight names and no normalisation of queries and keys."""
    fields = _decoder_fields(layers) | {
        "head_dim": 32,
        "intermediate_size": 64,
        "num_local_experts": experts,
        "num_experts_per_tok": experts_per_token,
    }
    return _write(path, lambda: MixtralForCausalLM(MixtralConfig(**fields | config)), seed=seed, dtype=dtype)


def make_vl(path: str | Path, *, seed: int = 0, dtype: str = "float32", layers: int = 2, **config: Any) -> Path:
    """A Qwen2.5-VL: the decoder with a vision tower of two blocks and the image processor's settings.

    vLLM's Rust server knows a multimodal model by its path, which must contain "Qwen2.5-VL".
    """
    text = _decoder_fields(layers) | {
        # Rotary frequencies of one head (16 pairs of its 32 dimensions) shared out to time, height and width.
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]},
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "num_heads": 4,
        "intermediate_size": 128,
        "out_hidden_size": text["hidden_size"],
        "patch_size": PATCH_PIXELS,
        "spatial_merge_size": MERGED_PIXELS // PATCH_PIXELS,
        "temporal_patch_size": 2,
        "window_size": 4 * MERGED_PIXELS,
        "fullatt_block_indexes": [1],
        "in_channels": 3,
        "initializer_range": WEIGHT_STD,
    }
    model_config = Qwen2_5_VLConfig(
        text_config=text | config,
        vision_config=vision,
        image_token_id=IMAGE_PAD_ID,
        video_token_id=VIDEO_PAD_ID,
        vision_start_token_id=VISION_START_ID,
        vision_end_token_id=VISION_END_ID,
        tie_word_embeddings=False,
    )
    out = _write(path, lambda: Qwen2_5_VLForConditionalGeneration(model_config), seed=seed, dtype=dtype)
    pixels = {"shortest_edge": 4 * MERGED_PIXELS**2, "longest_edge": 64 * MERGED_PIXELS**2}  # 4 to 64 tokens
    processor = {
        "processor_class": "Qwen2_5_VLProcessor",
        "size": pixels,
        "min_pixels": pixels["shortest_edge"],
        "max_pixels": pixels["longest_edge"],
        "patch_size": PATCH_PIXELS,
        "temporal_patch_size": 2,
        "merge_size": MERGED_PIXELS // PATCH_PIXELS,
        "do_convert_rgb": True,
        "do_resize": True,
        "resample": 3,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    _write_json(out / "preprocessor_config.json", {"image_processor_type": "Qwen2VLImageProcessor", **processor})
    _write_json(out / "video_preprocessor_config.json", {"video_processor_type": "Qwen2VLVideoProcessor", **processor})
    return out


def make_lora(
    path: str | Path,
    *,
    base: str | Path,
    seed: int = 0,
    dtype: str = "float32",
    rank: int = 8,
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj"),
    strength: float = 1.0,
) -> Path:
    """A PEFT adapter of the checkpoint `base`, on every linear module of it that is named in `targets`.

    `strength` is the standard deviation of the change that the adapter makes to a weight, in units of the weights' own:
    0 leaves the model as it is, 1 makes another model of it. `lora_alpha` is 2 * `rank`.

    Raises:
        ValueError: a target names no linear module of the base model.
    """
    config = AutoConfig.from_pretrained(base)
    auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    with torch.device("meta"):  # shapes only, no memory
        modules = dict(auto.from_config(config).named_modules())
    linears = {
        name: module
        for name, module in modules.items()
        if isinstance(module, torch.nn.Linear) and name.rsplit(".", 1)[-1] in targets
    }
    missing = set(targets) - {name.rsplit(".", 1)[-1] for name in linears}
    if missing:
        raise ValueError(f"targets: {sorted(missing)} name no linear module of {base}")
    # alpha / rank is 2: with factors of deviation s, an entry of 2 * B @ A has the deviation 2 * sqrt(rank) * s**2.
    factor_std = (strength * WEIGHT_STD / (2 * rank**0.5)) ** 0.5
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in sorted(linears.items()):
        shapes = {"lora_A": (rank, module.in_features), "lora_B": (module.out_features, rank)}
        for factor, shape in shapes.items():
            values = torch.randn(shape, generator=generator) * factor_std
            tensors[f"base_model.model.{name}.{factor}.weight"] = values.to(getattr(torch, dtype))
    out = Path(path)
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})
    _write_json(
        out / "adapter_config.json",
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": str(base),
            "r": rank,
            "lora_alpha": 2 * rank,
            "lora_dropout": 0.0,
            "target_modules": sorted(targets),
            "bias": "none",
            "fan_in_fan_out": False,
            "use_rslora": False,
            "use_dora": False,
            "modules_to_save": None,
            "inference_mode": True,
        },
    )
    return out


MAKERS: dict[str, Callable[..., Path]] = {
    "qwen3": make_dense,
    "qwen3-moe": make_moe,
    "mixtral": make_mixtral,
    "qwen-vl": make_vl,
    "lora": make_lora,
}
DIRECTORY_PREFIXES = {"qwen-vl": "Qwen2.5-VL-tiny"}  # see `make_vl`


def shared_model(kind: str, *, cache: str | Path | None = None, **options: Any) -> Path:
    """The directory of a model made once and kept for later runs, by kind and the maker's options. Read only.

    `cache` defaults to `.cache/models` in the repository. Safe for several processes at once: each makes its own and
    the first rename wins.
    """
    root = Path(cache) if cache is not None else Path(__file__).parents[2] / ".cache" / "models"
    made_from = [
        Path(__file__).read_text(encoding="utf-8"),
        importlib.metadata.version("transformers"),
        importlib.metadata.version("tokenizers"),
        sysconfig.get_python_version(),
        json.dumps([kind, options], sort_keys=True, default=str),
    ]
    digest = hashlib.sha256("\0".join(made_from).encode()).hexdigest()[:12]
    final = root / f"{DIRECTORY_PREFIXES.get(kind, kind)}-{digest}"
    if final.is_dir():
        return final
    root.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".making-", dir=root))
    try:
        MAKERS[kind](work / "model", **options)
        try:
            (work / "model").rename(final)
        except OSError:  # another process was first: its directory holds the same files
            if not final.is_dir():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return final


@functools.cache
def tokenizer_json() -> str:
    """A byte-level BPE of exactly `VOCABULARY` ids, trained on modules of Python's standard library, as tokenizer.json.

    Any text survives a round trip. The merges depend on the Python release, the size and the special ids do not.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise RuntimeError(f"the tokenizer has {tokenizer.get_vocab_size()} ids, not {VOCABULARY}")
    return str(tokenizer.to_str())


def _corpus() -> Iterator[str]:
    """The beginnings of the standard library's first modules, by name."""
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py"))[:CORPUS_FILES]:
        yield file.read_text(encoding="utf-8", errors="replace")[:CORPUS_FILE_CHARACTERS]


def _decoder_fields(layers: int) -> dict[str, Any]:
    """What all decoders have in common."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "initializer_range": WEIGHT_STD,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
    }


def _write(path: str | Path, build: Callable[[], PreTrainedModel], *, seed: int, dtype: str) -> Path:
    """Builds the model under `seed`, casts it once and saves it with the tokenizer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build().to(getattr(torch, dtype)).eval()
    out = Path(path)
    model.save_pretrained(out)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer_json()),
        eos_token=SPECIAL_TOKENS[EOS_ID],
        pad_token=SPECIAL_TOKENS[PAD_ID],
        model_max_length=4096,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(out)
    return out


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + os.linesep, encoding="utf-8")
