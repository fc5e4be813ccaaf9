"""Every sampling parameter of the wire: a value to try, and how vLLM in process treats it beside vLLM's own server.

`test_dense.py` asks both for each; the table in docs/engines.md says the same and why.
"""

from typing import Any, Final

SAME: Final = "same"
REFUSED: Final = "refused"
OURS: Final = "ours is right"

FIELDS: Final[dict[str, tuple[Any, str]]] = {
    "n": (2, SAME),
    "presence_penalty": (1.5, SAME),
    "frequency_penalty": (1.5, SAME),
    "repetition_penalty": (1.4, SAME),
    "temperature": (0.6, SAME),
    "top_p": (0.7, SAME),
    "top_k": (4, SAME),
    "min_p": (0.1, SAME),
    "seed": (99, SAME),
    "stop": (["e", "a"], SAME),
    "stop_token_ids": (list(range(600, 700)), SAME),
    "ignore_eos": (True, SAME),
    "max_tokens": (3, SAME),
    "min_tokens": (4, SAME),
    "logprobs": (2, OURS),
    "prompt_logprobs": (1, SAME),
    "prompt_logprob_token_ids": ([5], REFUSED),
    "prompt_logprob_start": (0, REFUSED),
    "logprob_token_ids": ([5, 6], REFUSED),
    "flat_logprobs": (True, SAME),
    "detokenize": (False, SAME),
    "skip_special_tokens": (False, SAME),
    "spaces_between_special_tokens": (False, SAME),
    "include_stop_str_in_output": (True, SAME),
    "stream_interval": (4, SAME),
    "structured_outputs": ({"regex": "[ab]{4}"}, SAME),
    "logit_bias": ({"500": 6.0}, SAME),
    "allowed_token_ids": ([500, 501, 502], SAME),
    "extra_args": ({"anything": 1}, SAME),
    "bad_words": (["e", "the"], SAME),
    "skip_reading_prefix_cache": (True, SAME),
    "thinking_token_budget": (3, REFUSED),
    "repetition_detection": ({"max_pattern_size": 3, "min_count": 3}, SAME),
    "routed_experts_prompt_start": (1, SAME),
    "watermarking": (False, SAME),
}
