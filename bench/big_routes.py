"""What the routed experts of one long sample cost: 30,000 tokens, 48 MoE layers, 8 experts each (11.5 MB as uint8).

    python bench/big_routes.py [--rounds 5]

Per server process: CPU seconds and the longest stall of the event loop (median of the rounds, and the worst); for the
client: time to the last byte, and bytes. Below, the same numbers as nested JSON integers, written once and read once,
which is what every hop would pay that parses them.
"""

import argparse
import statistics
import time
from typing import Any

import msgspec
import numpy as np

from rollplane.protocol.events import EndEvent, PromptEvent
from rollplane.protocol.info import Capabilities, MoeShape
from rollplane.testing import ScriptedEngine, script_choice, scripted_info
from served import Hop, Reading, hops

PROMPT_TOKENS, OUT_TOKENS = 22_000, 8_001
ROWS, LAYERS, TOP_K, EXPERTS = PROMPT_TOKENS + OUT_TOKENS - 1, 48, 8, 128
BODY = msgspec.json.encode(
    {"token_ids": [1] * PROMPT_TOKENS, "sampling_params": {}, "rollplane": {"routed_experts": True}}
)


def make_routes() -> np.ndarray[Any, Any]:
    """uint8 [ROWS, LAYERS, TOP_K]; no row repeats an expert."""
    rng = np.random.default_rng(0)
    block = rng.permuted(np.tile(np.arange(EXPERTS, dtype=np.uint8), (512, LAYERS, 1)), axis=2)[:, :, :TOP_K]
    return np.resize(block, (ROWS, LAYERS, TOP_K))


def make_engine() -> ScriptedEngine:
    """An engine whose every answer is the same long sample, made before."""
    events = [PromptEvent(prompt_tokens=PROMPT_TOKENS), script_choice([1] * OUT_TOKENS, routed_experts=make_routes())]
    info = scripted_info(
        max_model_len=40_000,
        moe=MoeShape(layers=LAYERS, top_k=TOP_K, num_experts=EXPERTS),
        capabilities=Capabilities(routed_experts=True),
    )
    return ScriptedEngine([*events, EndEvent()], info=info)


def ask(url: str, accept: str) -> tuple[float, int]:
    """Seconds to the last byte, and bytes, of one answer that is only received."""
    import http.client
    import urllib.parse

    place = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(str(place.hostname), place.port)
    began_s = time.perf_counter()
    headers = {"Content-Type": "application/json", "Accept": accept}
    connection.request("POST", "/inference/v1/generate", body=BODY, headers=headers)
    answer = connection.getresponse()
    size = len(answer.read())
    took_s = time.perf_counter() - began_s
    connection.close()
    if answer.status != 200:
        raise SystemExit(f"{url} answered {answer.status}")
    return took_s, size


def measure(chain: list[Hop], accept: str, *, rounds: int) -> None:
    """Print one line per hop."""
    ask(chain[-1].url, accept)
    times_s: list[float] = []
    readings: dict[str, list[Reading]] = {hop.name: [] for hop in chain}
    size = 0
    for _ in range(rounds):
        for hop in chain:
            hop.read()
        took_s, size = ask(chain[-1].url, accept)
        times_s.append(took_s)
        for hop in chain:
            readings[hop.name].append(hop.read())
    through = " < ".join(hop.name for hop in reversed(chain))
    print(f"{accept} from {through}: {statistics.median(times_s) * 1e3:.0f} ms to the last byte, {size / 1e6:.1f} MB")
    for name, found in readings.items():
        cpu_s = statistics.median(reading.cpu_s for reading in found)
        stalls_s = [reading.stall_s for reading in found]
        print(
            f"  {name:9s} {cpu_s * 1e3:6.0f} ms CPU, event loop stalled {statistics.median(stalls_s) * 1e3:5.1f} ms "
            f"(worst {max(stalls_s) * 1e3:.1f})"
        )


def main() -> None:
    """Measure everything once."""
    parser = argparse.ArgumentParser(description="Cost of the routed experts of one long sample.")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    for frontend in (False, True):
        with hops(make_engine, frontend=frontend) as chain:
            for accept in ("application/json", "application/msgpack"):
                measure(chain, accept, rounds=args.rounds)
    nested = make_routes().tolist()
    began_s = time.process_time()
    text = msgspec.json.encode(nested)
    written_s = time.process_time()
    msgspec.json.decode(text)
    read_s = time.process_time()
    print(
        f"as nested JSON integers: {len(text) / 1e6:.1f} MB, {(written_s - began_s) * 1e3:.0f} ms CPU to write and "
        f"{(read_s - written_s) * 1e3:.0f} ms to read, at every hop that parses them"
    )


if __name__ == "__main__":
    main()
