"""The client of TRL's asynchronous GRPO, unmodified, in its order: `trl_async.py URL ADAPTER ADAPTER`. One JSON line.

Its rollouts are posted by the trainer's worker process itself; their body stands here with its fields.
"""

import importlib
import importlib.util
import json
import logging
import random
import sys
import types
from pathlib import Path

import requests

# Its packages' own __init__ import trainers, and the module a logger of accelerate's, which this environment lacks.
found = importlib.util.find_spec("trl")
assert found is not None
assert found.origin is not None
for name in ("trl.experimental", "trl.experimental.async_grpo"):
    package = types.ModuleType(name)
    package.__path__ = [str(Path(found.origin).parent.joinpath(*name.split(".")[1:]))]
    sys.modules[name] = package
loggers = types.ModuleType("accelerate.logging")
loggers.get_logger = logging.getLogger  # type: ignore[attr-defined]
sys.modules.setdefault("accelerate", types.ModuleType("accelerate"))
sys.modules["accelerate.logging"] = loggers
VLLMClient = importlib.import_module("trl.experimental.async_grpo.vllm_client").VLLMClient


def roll_out(url: str, model: str) -> dict[str, object]:
    body = {
        "model": model,
        "prompt": [11, 12, 13],
        "max_tokens": 4,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "repetition_penalty": 1.0,
        "n": 1,
        "return_token_ids": True,
        "logprobs": 0,
        "seed": random.getrandbits(63),
    }
    answer = requests.post(f"{url}/v1/completions", json=body, timeout=60)
    answer.raise_for_status()
    choice = answer.json()["choices"][0]
    return {"ids": choice["token_ids"], "logprobs": choice["logprobs"]["token_logprobs"]}


url, *adapters = sys.argv[1:]
client = VLLMClient(url, server_timeout=10.0)
client.wait_for_server_ready()
info = client.get_server_info()
rollouts = []
for version, path in enumerate(adapters, 1):
    client.load_lora_adapter(f"policy-v{version}", path)
    rollouts.append(roll_out(url, f"policy-v{version}"))
client.unload_lora_adapter("policy-v1")
client.unload_lora_adapter("nobody")
client.pause()
client.resume()
refused = {}
for what, call in (
    ("init", lambda: client.init_weight_transfer_engine({"master_address": "127.0.0.1", "master_port": 1})),
    ("start", client.start_weight_update),
    ("update", lambda: client.update_weights({"names": [], "dtype_names": [], "shapes": []})),
    ("finish", client.finish_weight_update),
):
    try:
        call()
    except Exception as error:
        refused[what] = str(error)
print(
    json.dumps(
        {
            "max_model_len": client.get_max_model_len(),
            "dtype": client.get_dtype(),
            "world_size": client.get_world_size(),
            "lora_config": info["lora_config"],
            "data_parallel_size": info["parallel_config"]["data_parallel_size"],
            "rollouts": rollouts,
            "after": roll_out(url, "policy-v2"),
            "refused": refused,
        }
    )
)
