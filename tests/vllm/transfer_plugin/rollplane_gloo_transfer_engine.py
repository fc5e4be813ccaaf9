"""Weights broadcast by rank 0 of a gloo group, loaded layer by layer as vLLM's NCCL backend does."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.utils import stateless_init_torch_distributed_process_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


@dataclass
class GlooInit(WeightTransferInitInfo):
    """Where rank 0 waits, and this server's first rank."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int


@dataclass
class GlooUpdate(WeightTransferUpdateInfo):
    """What rank 0 now broadcasts, in order."""

    names: list[str] = field(default_factory=list)
    dtype_names: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)


class GlooTransfer(WeightTransferEngine[GlooInit, GlooUpdate]):
    """The backend `test_gloo`."""

    init_info_cls = GlooInit
    update_info_cls = GlooUpdate

    def init_transfer_engine(self, init_info: GlooInit) -> None:
        self.group = stateless_init_torch_distributed_process_group(
            host=init_info.master_address,
            port=init_info.master_port,
            rank=init_info.rank_offset + self.parallel_config.rank,
            world_size=init_info.world_size,
            backend="gloo",
        )

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:  # the base class waits for an accelerator
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: GlooUpdate) -> None:
        self.model.load_weights(self._received(update_info))

    def _received(self, info: GlooUpdate) -> Iterator[tuple[str, torch.Tensor]]:
        for name, dtype, shape in zip(info.names, info.dtype_names, info.shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            self.group.broadcast(tensor, 0).wait()
            yield name, tensor

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None: ...
