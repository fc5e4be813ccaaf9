"""The tiny Qwen2.5-VL of the image run: made here with a tokenizer of bytes, saved as a Hugging Face directory."""

import json
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

SPECIAL_TOKENS: Final = (
    "<|pad|>",
    "<|start|>",
    "<|end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
PAD, START, END, VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD = range(len(SPECIAL_TOKENS))
DIRECTORY: Final = "Qwen2.5-VL-tiny"
"""vLLM's Rust server knows a multimodal model by its path, which must hold the family's name."""

PATCH_PIXELS, MERGE = 14, 2
IMAGE_PIXELS: Final = 56
"""Side of the images: 16 patches, 4 embeddings."""

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|start|>{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}"
    "{% endfor %}<|end|>{% endfor %}"
)


def make_policy(path: Path, *, seed: int) -> Path:
    """Write a random float32 model: hidden size 128, two decoder layers, a vision tower of two blocks."""
    text: dict[str, Any] = {
        "vocab_size": len(SPECIAL_TOKENS) + 256,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": END,
        "pad_token_id": PAD,
        # Rotary frequencies of one head (16 pairs of its 32 dimensions), shared out to time, height and width.
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]},
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "num_heads": 4,
        "intermediate_size": 128,
        "out_hidden_size": text["hidden_size"],
        "patch_size": PATCH_PIXELS,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "window_size": 4 * MERGE * PATCH_PIXELS,
        "fullatt_block_indexes": [1],
        "in_channels": 3,
        "initializer_range": 0.1,
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE_PAD,
        video_token_id=VIDEO_PAD,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(config).float().eval()
    model.save_pretrained(path)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_bytes_tokenizer(), eos_token=SPECIAL_TOKENS[END], pad_token=SPECIAL_TOKENS[PAD]
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(path)
    side = MERGE * PATCH_PIXELS
    pixels = {"shortest_edge": 4 * side**2, "longest_edge": 64 * side**2}
    processor = {
        "processor_class": "Qwen2_5_VLProcessor",
        "size": pixels,
        "min_pixels": pixels["shortest_edge"],
        "max_pixels": pixels["longest_edge"],
        "patch_size": PATCH_PIXELS,
        "temporal_patch_size": 2,
        "merge_size": MERGE,
        "do_convert_rgb": True,
        "do_resize": True,
        "resample": 3,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.25, 0.25, 0.25],
    }
    for name, kind in (("preprocessor", "image"), ("video_preprocessor", "video")):
        named = {f"{kind}_processor_type": f"Qwen2VL{kind.title()}Processor", **processor}
        (path / f"{name}_config.json").write_text(json.dumps(named, indent=1) + "\n")
    return path


def _bytes_tokenizer() -> Tokenizer:
    """One id per byte, after the special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer
