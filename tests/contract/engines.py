"""The engines that the contract suite holds to their promises: add a case here, and every check runs on it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
from tests.contract.embedded_cases import make_embedded
from tests.contract.grpc_over_mock import GRPC_LACKS, make_grpc
from tests.contract.native_cases import NO_NATIVE, TRANSFER

from rollplane.engines.mock.engine import MockEngine
from rollplane.engines.mock.settings import MockSettings
from rollplane.protocol.info import MoeShape
from rollplane.testing import Subject


@dataclass(frozen=True, kw_only=True)
class EngineCase:
    """An engine, and what it does not promise.

    `make` gets an empty directory for checkpoints and adapters, and returns a `Subject` whose engine is not started. The
    checkpoints hold other weights than the engine starts with, and than each other.
    `lacks`: names of the checks that do not apply: one that stops applying is a lost promise, not a pass.
    """

    make: Callable[[Path], Subject]
    lacks: frozenset[str] = frozenset()


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


def make_mock(settings: MockSettings) -> Callable[[Path], Subject]:
    def make(root: Path) -> Subject:
        weights, adapters = mock_files(root)
        return Subject(engine=MockEngine(settings), weights=weights, adapters=adapters, transfer=TRANSFER)

    return make


MOE = MoeShape(layers=3, top_k=4, num_experts=512)
NO_SIDE_CHANNELS = frozenset({"masks_are_the_support", "routes_begin_where_asked"})

NO_BLOCK_CACHE = frozenset({"salts_separate_caches", "kv_events_tell_what_is_cached"})

GRPC_MOCK = MockSettings(vocab_tokens=1024, step_s=0.001, transfer_backend="nccl", sleep_mode=True)

ENGINES: dict[str, EngineCase] = {
    "mock-instant": EngineCase(
        make=make_mock(MockSettings()),
        # A unary request is done before an abort can reach it.
        lacks=NO_SIDE_CHANNELS | NO_NATIVE | {"an_aborted_unary_request_keeps_its_tokens"},
    ),
    "mock-paced": EngineCase(
        make=make_mock(
            MockSettings(
                step_s=0.001,
                prefill_tokens_per_s=2_000_000.0,
                vocab_tokens=1024,
                transfer_backend="mock",
                sleep_mode=True,
            )
        ),
        lacks=NO_SIDE_CHANNELS,
    ),
    "mock-moe": EngineCase(
        make=make_mock(MockSettings(moe=MOE, sampling_mask=True, vocab_tokens=128, step_s=0.0005)),
        lacks=NO_NATIVE,
    ),
    "mock-bare": EngineCase(
        make=make_mock(
            MockSettings(cache_blocks=0, max_adapters=0, features=(), max_num_seqs=4, step_per_sequence_s=0.0003)
        ),
        lacks=NO_SIDE_CHANNELS
        | NO_NATIVE
        | {"salts_separate_caches", "kv_events_tell_what_is_cached", "adapters_load_serve_and_go"},
    ),
    "vllm-grpc-one-token": EngineCase(
        make=make_grpc(mock_files, GRPC_MOCK, tokens_per_message=1),
        lacks=NO_SIDE_CHANNELS | GRPC_LACKS,
    ),
    "vllm-grpc-as-it-comes": EngineCase(
        make=make_grpc(mock_files, GRPC_MOCK, tokens_per_message=None),
        lacks=NO_SIDE_CHANNELS | GRPC_LACKS,
    ),
    "embedded": EngineCase(
        make=make_embedded("qwen3"), lacks=NO_BLOCK_CACHE | NO_NATIVE | {"routes_begin_where_asked"}
    ),
    "embedded-moe": EngineCase(make=make_embedded("qwen3-moe"), lacks=NO_BLOCK_CACHE | NO_NATIVE),
}
