"""TRL's `VLLMClient`, unmodified, against the server whose URL is the argument; prints what it got as one JSON line."""

import importlib
import importlib.util
import json
import sys
import types
from pathlib import Path

# Its package's own __init__ imports the trainer's half too, and that accelerate; the client's module needs neither.
found = importlib.util.find_spec("trl")
assert found is not None
assert found.origin is not None
package = types.ModuleType("trl.generation")
package.__path__ = [str(Path(found.origin).parent / "generation")]
sys.modules["trl.generation"] = package
VLLMClient = importlib.import_module("trl.generation.vllm_client").VLLMClient


def main() -> None:
    client = VLLMClient(base_url=sys.argv[1])
    sampling = {"n": 2, "max_tokens": 5, "generation_kwargs": {"ignore_eos": True}}
    made = client.generate(prompts=[[11, 12, 13], [14, 15]], logprobs=0, **sampling)
    chat = client.chat(messages=[[{"role": "user", "content": "hello"}]], n=1, max_tokens=3, logprobs=0)
    scored = client.get_sequence_logprobs([[21, 22, 23, 24, 25]], [2], top_logprobs=2)
    client.reset_prefix_cache()
    try:
        client.init_communicator(device="cpu")
        refused = ""
    except RuntimeError as error:
        refused = str(error)
    print(
        json.dumps(
            {
                "prompts": made["prompt_ids"],
                "generated": made["completion_ids"],
                "logprobs": made["logprobs"],
                "chat": chat["completion_ids"],
                "scored": scored["actual_token_ids"],
                "world_size": client.get_world_size(),
                "refused": refused,
            }
        )
    )


if __name__ == "__main__":
    main()
