"""The vLLM gRPC engine in front of a mock server of its own, for the contract suite."""

from collections.abc import Callable
from pathlib import Path

from tests.contract.native_cases import TRANSFER

from rollplane.engines.grpc.engine import GrpcEngine
from rollplane.engines.grpc.mock_server import MockVllmServer
from rollplane.engines.grpc.settings import GrpcSettings
from rollplane.engines.mock.engine import MockEngine
from rollplane.engines.mock.settings import MockSettings
from rollplane.testing import Subject

# The services load no checkpoint, their answers do not say what was cached, and KV events come by another way.
GRPC_LACKS = frozenset(
    {
        "an_update_changes_what_is_made",
        "flushing_reports_what_it_did",
        "kv_events_tell_what_is_cached",
        "salts_separate_caches",
        "spans_say_which_version_made_which_token",
    }
)


class GrpcOverMock(GrpcEngine):
    """The sidecar's engine with a mock vLLM server of its own, which starts and stops with it."""

    def __init__(self, mock: MockSettings, *, tokens_per_message: int | None) -> None:
        super().__init__()
        self.server = MockVllmServer(
            MockEngine(mock),
            tokens_per_message=tokens_per_message,
            transfer_backend=mock.transfer_backend,
            sleep_mode=mock.sleep_mode,
        )
        self._vocab_size = mock.vocab_tokens

    async def start(self) -> None:
        await self.server.start()
        self.settings = GrpcSettings(endpoint=f"127.0.0.1:{self.server.port}", vocab_size=self._vocab_size)
        await super().start()

    async def close(self, *, grace_s: float = 0.0) -> None:
        await super().close(grace_s=grace_s)
        await self.server.stop()


def make_grpc(
    files: Callable[[Path], tuple[list[str], list[str]]], mock: MockSettings, *, tokens_per_message: int | None
) -> Callable[[Path], Subject]:
    """A maker of subjects; `files` makes checkpoints and adapters in a directory."""

    def make(root: Path) -> Subject:
        _, adapters = files(root)
        engine = GrpcOverMock(mock, tokens_per_message=tokens_per_message)
        return Subject(engine=engine, adapters=adapters, transfer=TRANSFER)

    return make
