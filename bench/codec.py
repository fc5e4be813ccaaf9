"""What the wire costs per token: decode of a long request, fold, check and encode of a long answer.

    python bench/codec.py [--tokens 32768] [--rounds 7]

Prints nanoseconds per token (the median of the rounds, CPU time of this process) and the Python objects that survive,
counted by the garbage collector's own list of tracked objects plus the allocator's count of live blocks: where arrays
serve, neither grows with the number of tokens.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from rollplane.fold import Fold, FoldPlan, check_again
from rollplane.protocol.answer import decode_msgpack, encode_json, encode_msgpack
from rollplane.protocol.artifacts import Alternatives, RoutedExperts, SamplingMask, TokenLogprobs
from rollplane.protocol.events import ChoiceEvent, EndEvent
from rollplane.protocol.hop import FrameReader, decode_hop_request, encode_frame, encode_hop_request
from rollplane.protocol.request import JSON, MSGPACK, parse_request

PROMPT_TOKENS = 1024
LAYERS, TOP_K, EXPERTS = 48, 8, 128
MASK_WIDTH = 8


def answer(tokens: int, *, top: int, routes: bool, mask: bool) -> ChoiceEvent:
    """A terminal event as an engine makes it: `tokens` ids, logprobs with `top` alternatives, routes, a mask."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 150_000, tokens).astype(np.int32)
    values = -rng.exponential(1.0, tokens).astype(np.float32)
    alternatives = Alternatives(
        ids=(ids[:, None] + np.arange(top, dtype=np.int32)).reshape(-1),
        values=np.repeat(values, top),
        ranks=np.tile(np.arange(1, top + 1, dtype=np.int32), tokens),
        offsets=np.arange(tokens + 1, dtype=np.int32) * np.int32(top),
    )
    rows = PROMPT_TOKENS + tokens - 1
    experts = rng.permuted(np.tile(np.arange(EXPERTS, dtype=np.uint8), (512, LAYERS, 1)), axis=2)[:, :, :TOP_K]
    width = np.arange(MASK_WIDTH, dtype=np.int32)
    return ChoiceEvent(
        index=0,
        token_ids=ids,
        logprobs=TokenLogprobs(
            values=values, ranks=np.ones(tokens, np.int32), alternatives=alternatives if top else None
        ),
        finish_reason="length",
        routed_experts=RoutedExperts(array=np.resize(experts, (rows, LAYERS, TOP_K))) if routes else None,
        sampling_mask=SamplingMask(
            ids=(ids[:, None] + width).reshape(-1),
            offsets=np.arange(0, tokens * MASK_WIDTH + 1, MASK_WIDTH, dtype=np.int32),
        )
        if mask
        else None,
        policy_versions=[("v1", 0)],
    )


def fold(event: ChoiceEvent, plan: FoldPlan) -> Any:
    """The checked answer of one terminal event."""
    folding = Fold(plan)
    folding.add(event)
    folding.add(EndEvent())
    return folding.response(created=0)


def measure(name: str, work: Callable[[], Any], *, tokens: int, rounds: int) -> None:
    """Print the cost of `work` per token, and what is left of it while its result is held."""
    work()
    times_s = []
    for _ in range(rounds):
        began_s = time.process_time()
        work()
        times_s.append(time.process_time() - began_s)
    gc.collect()
    tracked, blocks = len(gc.get_objects()), sys.getallocatedblocks()
    held = work()
    gc.collect()
    tracked, blocks = len(gc.get_objects()) - tracked, sys.getallocatedblocks() - blocks
    size = f"{len(held) / tokens:7.1f} B/token" if isinstance(held, bytes) else " " * 15
    cost_ns = statistics.median(times_s) / tokens * 1e9
    print(f"{name:44s} {cost_ns:9.1f} ns/token {size}  objects {tracked:4d}, blocks {blocks:4d}")


def main() -> None:
    """Measure everything once."""
    parser = argparse.ArgumentParser(description="Cost of the codecs per token.")
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    tokens, rounds = args.tokens, args.rounds

    def run(name: str, work: Callable[[], Any]) -> None:
        measure(name, work, tokens=tokens, rounds=rounds)

    ids = np.random.default_rng(0).integers(0, 150_000, tokens).astype(np.int32)
    params = {"temperature": 1.0, "top_k": -1, "min_p": 0.0, "logprobs": 1, "max_tokens": 64}
    as_json = msgspec.json.encode({"token_ids": ids.tolist(), "sampling_params": params})
    as_msgpack = msgspec.msgpack.encode(
        {"token_ids": {"dtype": "int32", "shape": [tokens], "data": ids.tobytes()}, "sampling_params": params}
    )
    request = parse_request(as_json)
    hop = encode_hop_request(request)
    print(f"a request of {tokens} tokens")
    run("  parse JSON", lambda: parse_request(as_json, content_type=JSON))
    run("  parse msgpack", lambda: parse_request(as_msgpack, content_type=MSGPACK))
    run("  encode for the hop", lambda: encode_hop_request(request))
    run("  decode from the hop", lambda: decode_hop_request(hop))

    for title, top, routes, mask in [
        ("logprobs", 0, False, False),
        ("logprobs with the sampled token as alternative", 1, False, False),
        ("logprobs with 5 alternatives", 5, False, False),
        (f"logprobs, routes {LAYERS}x{TOP_K}, masks of {MASK_WIDTH}", 0, True, True),
    ]:
        event = answer(tokens, top=top, routes=routes, mask=mask)
        plan = FoldPlan(
            request_id="r", model="m", choices=1, prompt_tokens=PROMPT_TOKENS, logprobs=True, routes=routes, mask=mask
        )
        response = fold(event, plan)
        packed, frame = encode_msgpack(response), encode_frame([event, EndEvent()])
        print(f"an answer of {tokens} tokens: {title}")
        run("  fold and check", lambda event=event, plan=plan: fold(event, plan))
        run("  check again", lambda response=response, plan=plan: check_again(response, plan))
        run("  encode JSON", lambda response=response: encode_json(response))
        run("  encode msgpack", lambda response=response: encode_msgpack(response))
        run("  decode msgpack", lambda packed=packed: decode_msgpack(packed))
        run("  encode a frame", lambda event=event: encode_frame([event, EndEvent()]))
        run("  read a frame", lambda frame=frame: list(FrameReader().feed(frame)))


if __name__ == "__main__":
    main()
