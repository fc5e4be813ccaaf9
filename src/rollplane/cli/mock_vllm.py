"""`rollplane mock-vllm`: our mock engine behind vLLM's gRPC services."""

import asyncio
import signal

from rollplane.cli.engines import build_engine
from rollplane.config import MockVllmSettings, ServerSettings, Settings, WorkerSettings
from rollplane.engines.grpc.mock_server import MockVllmServer
from rollplane.server import ops


async def serve(settings: MockVllmSettings) -> None:
    """Serve until told to stop.

    Raises:
        InvalidRequest: an option that the mock engine does not have.
    """
    ops.check_ready_file(settings.ready_file)
    engine = build_engine(WorkerSettings(engine="mock", engine_option=settings.engine_option))
    server = MockVllmServer(
        engine,
        address=f"{settings.host}:{settings.port}",
        tokens_per_message=settings.tokens_per_message or None,
        model_id=settings.model,
        world_size=settings.world_size,
        max_request_bytes=settings.max_request_bytes,
        recorded_calls=0,
    )
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    await server.start()
    try:
        ops.say_ready(
            ServerSettings(ready_file=settings.ready_file),
            url=f"grpc://{settings.host}:{server.port}",
            role="mock-vllm",
            model=engine.info.model,
        )
        await stopped.wait()
    finally:
        await server.stop()


def main(settings: Settings) -> None:
    """Serve a mock engine as a vLLM gRPC server."""
    from rollplane.cli.logs import run_logged

    run_logged(ServerSettings(), serve(settings.table(MockVllmSettings)))
