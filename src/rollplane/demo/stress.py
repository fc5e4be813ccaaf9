"""The routing stress: a random model whose router is undecided, so that replay has something to correct.

After training, a few tokens dominate the mismatch and the share of the routes in it is unreliable. A random model with
32 experts, 4 of them per token, keeps many near ties: bfloat16 and float32 choose differently often enough to measure.
"""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np

from rollplane.demo.models import EXPERTS, make_model, save_model
from rollplane.demo.rollouts import Rollouts, collect

VOCABULARY = 1024
SEQUENCES, PROMPT_TOKENS, OUTPUT_TOKENS = 32, 64, 128
EOS, PAD = 1, 0


def save_stress_model(path: Path) -> Path:
    """Write the checkpoint, the same at every run, and return its directory."""
    return save_model(make_model(vocabulary=VOCABULARY, top_k=4, seed=0, eos=EOS, pad=PAD), path)


async def roll_out_stress(client: Any) -> Rollouts:
    """32 random prompts of 64 tokens, 128 output tokens each, at temperature 1 and top-p 0.95.

    Raises:
        ReplayError: an answer that breaks its invariants.
    """
    prompts = np.random.default_rng(0).integers(2, VOCABULARY, (SEQUENCES, PROMPT_TOKENS)).tolist()
    responses = await asyncio.gather(
        *(
            client.generate(
                prompt,
                sampling_params={
                    "temperature": 1.0,
                    "top_p": 0.95,
                    "max_tokens": OUTPUT_TOKENS,
                    "ignore_eos": True,
                    "seed": index,
                    "logprobs": 0,
                },
                routed_experts=True,
                sampling_mask=True,
            )
            for index, prompt in enumerate(prompts)
        )
    )
    choices = [response.choices[0] for response in responses]
    return collect(prompts, choices, experts=EXPERTS, vocabulary=VOCABULARY)
