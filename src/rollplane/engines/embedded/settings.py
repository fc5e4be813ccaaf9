"""How an embedded engine is set up."""

import msgspec

from rollplane.errors import InvalidRequest

DTYPES = ("float32", "bfloat16")


class EmbeddedSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An embedded engine's settings.

    Args:
        model: a local checkpoint directory in the Hugging Face layout, with safetensors weights.
        served_model_name: names the model answers to, the first is its main one; the directory's name if empty.
        dtype: float32 gives the same tokens whoever shares the batch; bfloat16 is faster on large models.
        max_model_len: longest prompt and completion together, in tokens; what the model was trained for if absent.
        max_num_seqs: sequences that run at once.
        policy_version: version of the weights at the start; the directory's name if absent.
        chunk_tokens: prompt tokens computed with one decode step.
        max_logprobs: most alternatives per token that a request may ask for.
        max_loras, max_lora_rank: adapters held at once, and their largest rank.
        threads: torch's threads; absent leaves torch's own choice.
        seed: makes requests without a seed repeatable, in their order of arrival.
    """

    model: str
    served_model_name: list[str] = msgspec.field(default_factory=list)
    dtype: str = "float32"
    max_model_len: int | None = None
    max_num_seqs: int = 32
    policy_version: str | None = None
    chunk_tokens: int = 512
    max_logprobs: int = 64
    max_loras: int = 8
    max_lora_rank: int = 64
    threads: int | None = None
    seed: int | None = None

    def check(self) -> None:
        """Refuse values that nothing could be built from.

        Raises:
            InvalidRequest: naming the setting.
        """
        if self.dtype not in DTYPES:
            raise InvalidRequest(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}", param="dtype")
        for name in ("max_model_len", "max_num_seqs", "chunk_tokens", "max_lora_rank", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidRequest(f"{name} must be at least 1, got {value}", param=name)
        for name in ("max_logprobs", "max_loras"):
            if getattr(self, name) < 0:
                raise InvalidRequest(f"{name} must be at least 0, got {getattr(self, name)}", param=name)
        if self.max_model_len == 1:
            raise InvalidRequest(
                "max_model_len must be at least 2: one prompt token and one generated", param="max_model_len"
            )
