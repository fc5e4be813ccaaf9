"""`tests.policy_machine` over the vLLM gRPC engine and a mock server: weights come by the server's own transfer only."""

import shutil
import tempfile
from pathlib import Path

import pytest
from tests.contract.grpc_over_mock import GrpcOverMock
from tests.policy_machine import ADAPTERS, CONTENTS, run_machine
from tests.unit.test_policy_machine import MockKind, Native, part, write_adapter, write_checkpoint

from rollplane.engines.mock.settings import MockSettings
from rollplane.errors import RollplaneError

SERVER = MockSettings(
    weights="w0",
    policy_version="w0",
    step_s=0.001,
    max_adapters=3,
    max_num_seqs=4,
    transfer_backend="mock",
    sleep_mode=True,
)


class GrpcKind(MockKind):
    """The same tokens as the mock's, for the server has one behind it."""

    def make(self) -> GrpcOverMock:  # type: ignore[override]
        return GrpcOverMock(SERVER, tokens_per_message=1)


class OverGrpc(Native):
    """No rpc loads a checkpoint: after a failed update only another one by transfer brings the worker back."""

    unary_spans = False

    async def recover(self) -> None:
        if self.worker.state == "failed":
            try:
                await self.worker.init_weight_transfer({})
                await self.worker.start_weight_update()
                await self.worker.update_weights(part(CONTENTS))
                await self.worker.finish_weight_update(f"w{CONTENTS}")
            except RollplaneError:
                return
        await super().recover()


@pytest.mark.timeout(300)
def test_a_worker_over_a_vllm_server() -> None:
    root = Path(tempfile.mkdtemp())
    try:
        checkpoints = [write_checkpoint(root / f"w{i}", i) for i in range(CONTENTS)]
        kind = GrpcKind(checkpoints, [write_adapter(root / f"l{i}", i) for i in range(ADAPTERS)])
        run_machine(OverGrpc, kind, examples=5, steps=20)
    finally:
        shutil.rmtree(root)
