"""What runs inside vLLM's worker processes: replacing the weights of a loaded model, and its ranks in a
trainer's broadcast (`group_extension`).

vLLM mixes `WorkerExtension` into its worker class, so every name here starts with `rollplane_`. Calls and answers are
plain data; an exception would arrive as text only, so what went wrong is an answer too.
"""

from collections.abc import Iterator
from typing import Any

from rollplane.engines.vllm.checkpoints import changed_files
from rollplane.engines.vllm.group_extension import GroupExtension


class WorkerExtension(GroupExtension):
    """Mixed into vLLM's worker; `self` is the worker."""

    model_runner: Any
    vllm_config: Any

    def rollplane_load_weights(self, path: str, stamps: list[list[Any]], skipped: list[str]) -> dict[str, Any]:
        """Replace the model's weights by the safetensors files at `path`, in place.

        Args:
            stamps: the files as they were checked (`checkpoints.stamp`); others now are refused before anything is touched.
            skipped: tensors in them that the model has no place for.

        Returns:
            `{"loaded": tensors}`; `{"refused": why}`: nothing was touched; `{"broken": why}`: the model is half written.
        """
        if why := changed_files(path, stamps):
            return {"refused": why}
        try:
            return {"loaded": self._rollplane_reload(path, [str(name) for name, *_ in stamps], skipped)}
        except Exception as error:  # whatever it was, the caller must hear that the model is not whole
            return {"broken": f"{type(error).__name__}: {error}"[:1000]}

    def rollplane_keep_base_apart(self) -> int:
        """Give every LoRA layer a slot of zeros behind its last one; how many layers there are.

        vLLM marks a row without an adapter with slot -1, which its CPU kernels take for the last slot: the base model's
        rows would get whatever adapter is there.
        """
        import torch

        count = 0
        for module in self.model_runner.get_model().modules():
            stacked: Any = getattr(module, "lora_b_stacked", None)
            if isinstance(stacked, tuple):
                module.lora_b_stacked = tuple(torch.cat((each, torch.zeros_like(each[:1]))) for each in stacked)
                count += 1
            elif isinstance(stacked, torch.Tensor):
                module.lora_b_stacked = torch.cat((stacked, torch.zeros_like(stacked[:1])))
                count += 1
        return count

    def _rollplane_reload(self, path: str, names: list[str], skipped: list[str]) -> int:
        import torch
        from vllm.config import set_current_vllm_config

        _end_unfinished(self.model_runner.get_model())
        on_cpu = torch.device(self.vllm_config.device_config.device).type == "cpu"
        for module in self.model_runner.get_model().modules():
            # vLLM's CPU experts are packed once, when their kernel is made; without this a reload copies unpacked weights
            # into the packed buffer and serves them.
            method: Any = getattr(module, "quant_method", None)
            if on_cpu and getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None
        count = 0

        def counted() -> Iterator[tuple[str, Any]]:
            nonlocal count
            for pair in _tensors(path, names, skipped=frozenset(skipped)):
                count += 1
                yield pair

        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            self.model_runner.reload_weights(weights_iterator=counted())
        return count


def _end_unfinished(model: Any) -> None:
    """Give every layer that an earlier reload left half way its own tensors back, which that reload had not written.

    vLLM would go on with what the layer has buffered, count the next reload's tensors on top, and take it for whole when
    a fused tensor has its queries twice and no keys.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load():
            if info.kernel_tensors is not None:
                layerwise._place_kernel_tensors(layer, info)
            info.reset()


def _tensors(path: str, names: list[str], *, skipped: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """Every tensor of the files but those `skipped`, one at a time."""
    from safetensors import safe_open

    for name in names:
        with safe_open(f"{path}/{name}", framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a dict
                if key not in skipped:
                    yield key, file.get_tensor(key)
