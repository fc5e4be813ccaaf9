"""Registers Qwen3-MoE with vLLM as a model whose experts are plain torch, in every process that vLLM starts."""


def register() -> None:
    """What vLLM calls at its start."""
    from vllm import ModelRegistry

    ModelRegistry.register_model("Qwen3MoeForCausalLM", "rollplane_torch_moe_model:TorchQwen3Moe")
