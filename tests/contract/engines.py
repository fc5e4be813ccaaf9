"""The engines that the contract suite holds to their promises: add a factory here, and every check runs on it.

A factory gets an empty directory for checkpoints and adapters, and returns a `Subject` whose engine is not started. Its
checkpoints must hold other weights than the engine starts with, and than each other.
"""

from collections.abc import Callable
from pathlib import Path

import msgspec

from rollplane.engines.mock.engine import MockEngine
from rollplane.engines.mock.settings import MockSettings
from rollplane.protocol.info import MoeShape
from rollplane.testing import Subject

Factory = Callable[[Path], Subject]


def mock_files(root: Path) -> tuple[list[str], list[str]]:
    """Two checkpoints and two adapters that a mock engine takes."""
    weights, adapters = [], []
    for i in range(2):
        checkpoint, adapter = root / f"weights-{i}", root / f"adapter-{i}"
        checkpoint.mkdir(parents=True)
        adapter.mkdir(parents=True)
        (checkpoint / "mock_weights.json").write_bytes(msgspec.json.encode({"seed": i}))
        (adapter / "adapter_config.json").write_bytes(msgspec.json.encode({"r": 8, "seed": i}))
        weights.append(str(checkpoint))
        adapters.append(str(adapter))
    return weights, adapters


def make_mock(settings: MockSettings) -> Factory:
    def make(root: Path) -> Subject:
        weights, adapters = mock_files(root)
        return Subject(engine=MockEngine(settings), weights=weights, adapters=adapters)

    return make


MOE = MoeShape(layers=3, top_k=4, num_experts=512)

ENGINES: dict[str, Factory] = {
    "mock-instant": make_mock(MockSettings()),
    "mock-paced": make_mock(MockSettings(step_s=0.001, prefill_tokens_per_s=2_000_000.0, vocab_tokens=1024)),
    "mock-moe": make_mock(MockSettings(moe=MOE, sampling_mask=True, vocab_tokens=128, step_s=0.0005)),
    "mock-bare": make_mock(
        MockSettings(cache_blocks=0, max_adapters=0, features=(), max_num_seqs=4, step_per_sequence_s=0.0002)
    ),
}
