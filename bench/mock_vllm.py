"""The mock vLLM gRPC server of the benchmarks: answers are made in one go, then cut as asked, so that it costs little itself.

    python bench/mock_vllm.py --port 50051 --model DIRECTORY [--tokens-per-message 1] [--stepwise]

`--stepwise`: streams are made token by token instead, so that messages come one by one, as those of a real engine do.

0 tokens per message: the whole answer in one, also over the streaming call.
"""

import argparse
import asyncio
import signal

from rollplane.engines.grpc.mock_server import MockVllmServer
from rollplane.engines.mock.engine import MockEngine
from rollplane.engines.mock.settings import MockSettings

VOCABULARY = 1024
MAX_MODEL_LEN = 40_000


async def serve(args: argparse.Namespace) -> None:
    """Serve until told to stop."""
    engine = MockEngine(MockSettings(model="roll", vocab_tokens=VOCABULARY, max_model_len=MAX_MODEL_LEN))
    server = MockVllmServer(
        engine,
        address=f"127.0.0.1:{args.port}",
        tokens_per_message=args.tokens_per_message or None,
        whole=not args.stepwise,
        model_id=args.model,
        recorded_calls=0,
    )
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    await server.start()
    await stopped.wait()
    await server.stop()


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens-per-message", type=int, default=1)
    parser.add_argument("--stepwise", action="store_true")
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
