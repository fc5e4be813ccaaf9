"""Registers a weight transfer backend with vLLM that works on a CPU, in every process that vLLM starts."""


def register() -> None:
    """What vLLM calls at its start."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if "test_gloo" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("test_gloo", "rollplane_gloo_transfer_engine", "GlooTransfer")
