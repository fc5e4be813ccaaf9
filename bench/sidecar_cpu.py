"""CPU per unary request: our worker over vLLM's gRPC services beside NVIDIA Dynamo's frontend and sidecar.

    python bench/sidecar_cpu.py [--rounds 3] [--requests 40] [--prompt 2048] [--tokens 1024]

The smallest case of `bench/compare.py`: both are in front of one mock vLLM server that streams one token per message, each when it is made, and
get the same requests, one after another, in turns. Counted is the CPU time of the serving processes (not the mock's, not the
client's), user and system, from /proc. Needs the Dynamo environment (`make vllm-env`).
"""

import argparse
import asyncio

import aiohttp

from compare import STEPWISE, Case, measure
from load import Load
from stacks import Rack, rack, wait_until_serving


async def compare(args: argparse.Namespace, made: Rack) -> None:
    """Print a line per stack and their ratio."""
    mock = made.mock(tokens_per_message=1, stepwise=True)
    stacks = [made.rollplane_worker(mock, kind=STEPWISE), made.dynamo(mock, kind=STEPWISE)]
    async with aiohttp.ClientSession() as session:
        for stack in stacks:
            await wait_until_serving(session, stack)
    load = Load(args.prompt, args.tokens, concurrency=1, requests=args.requests)
    rows = await measure([Case(stack, load, "unary") for stack in stacks], rounds=args.rounds)
    for row in rows:
        rounds = [round(each, 2) for each in row["rounds"]]
        print(f"{row['stack']:20} {row['cpu_ms_per_request']:7.2f} ms CPU per request   rounds {rounds}")
    print(f"ratio {rows[0]['ratio_to_dynamo']:.3f}  (prompt {args.prompt}, {args.tokens} tokens, logprobs 1)")


def main() -> None:
    """Compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=1024)
    with rack() as made:
        asyncio.run(compare(parser.parse_args(), made))


if __name__ == "__main__":
    main()
