import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.models import tiny
from transformers import AutoModelForCausalLM

from rollplane.engines.embedded.model import CausalModel, load_model
from rollplane.engines.embedded.sampler import Controls
from rollplane.engines.embedded.sequence import Generation
from rollplane.errors import InvalidRequest

Make = Callable[..., Any]
Ask = Callable[..., Generation]

EVERYTHING = {
    "logprobs": 3,
    "prompt_logprobs": 2,
    "sampling_mask": True,
    "routed_experts": True,
}


def mixed_requests(ask: Ask, count: int) -> list[Generation]:
    """Requests that differ in everything: lengths, truncation, penalties, bias, n."""
    rng = random.Random(5)
    made = []
    for i in range(count):
        made.append(
            ask(
                f"q{i}",
                rng.choice([3, 9, 33, 70]),
                seed=100 + i,
                max_tokens=rng.choice([1, 6, 17, 24]),
                n=rng.choice([1, 1, 1, 2]),
                controls=Controls(
                    temperature=rng.choice([0.0, 0.7, 1.0, 1.3]),
                    top_k=rng.choice([0, 0, 5, 40]),
                    top_p=rng.choice([1.0, 0.95, 0.8]),
                    min_p=rng.choice([0.0, 0.0, 0.02]),
                ),
                repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
                frequency_penalty=rng.choice([0.0, 0.3]),
                logit_bias=((9, 2.0), (11, -3.0)) if i % 5 == 0 else (),
                min_tokens=i % 3,
                ignore_eos=i % 4 != 0,
                **EVERYTHING,
            )
        )
    return made


def test_every_request_gets_the_same_answer_alone_and_among_seven(make_runner: Make, ask: Ask) -> None:
    requests = mixed_requests(ask, 40)
    # Seven slots and short chunks: prompts are cut, sequences join and leave all the time.
    together = make_runner(max_slots=7, chunk_tokens=16).submit(*requests).finish()
    assert len(together) == sum(r.n for r in requests)
    for request in requests:
        alone = make_runner(max_slots=2, chunk_tokens=512).submit(request).finish()
        for key, a in alone.items():
            b = together[key]
            assert a.tokens == b.tokens, key
            assert np.allclose(a.logprobs, b.logprobs, atol=2e-5)
            assert a.end.finish_reason == b.end.finish_reason
            assert np.array_equal(a.end.mask.ids, b.end.mask.ids)
            assert np.array_equal(a.end.mask.offsets, b.end.mask.offsets)
            assert np.array_equal(a.end.routes.array, b.end.routes.array)


def test_an_answer_is_what_a_full_forward_says(make_runner: Make, ask: Ask, moe: CausalModel, moe_dir: Path) -> None:
    """Prompt and sampled logprobs, masks and routes against Transformers' own forward over the whole sequence."""
    request = ask(prompt=20, max_tokens=10, controls=Controls(temperature=0.7, top_p=0.9), **EVERYTHING)
    got = make_runner(chunk_tokens=7).submit(request).only()
    ids = request.prompt.tolist() + got.tokens
    reference = AutoModelForCausalLM.from_pretrained(moe_dir)
    with torch.no_grad():
        out = reference(torch.tensor([ids[:-1]]), output_router_logits=True)
    raw = out.logits[0].log_softmax(-1)
    plp = got.prompt_logprobs
    own = plp.values[plp.offsets[1:-1]]
    assert plp.ids[plp.offsets[1:-1]].tolist() == ids[1:20]
    assert np.allclose(own, raw[range(19), ids[1:20]], atol=1e-4)
    mask = got.end.mask
    for t, token in enumerate(got.tokens):
        kept = torch.tensor(mask.ids[mask.offsets[t] : mask.offsets[t + 1]].astype(int))
        row = (out.logits[0, 19 + t] / 0.7)[kept].log_softmax(-1)
        assert abs(row[(kept == token).nonzero()[0, 0]].item() - got.logprobs[t]) < 1e-4
    assert got.ranks == [
        int((out.logits[0, 19 + t] > out.logits[0, 19 + t, i]).sum()) + 1 for t, i in enumerate(got.tokens)
    ]
    routes = torch.from_numpy(got.end.routes.array.astype(int))
    wanted = torch.stack([r.topk(2, dim=-1).indices for r in out.router_logits], 1)
    assert routes.shape == (29, 2, 2)
    assert got.end.routes.array.dtype == np.uint8
    assert torch.equal(routes.sort(-1).values, wanted.sort(-1).values)


def test_greedy_is_the_models_own_greedy(make_runner: Make, ask: Ask, moe_dir: Path) -> None:
    request = ask(controls=Controls(temperature=0), max_tokens=12, logprobs=0, sampling_mask=True)
    got = make_runner().submit(request).only()
    reference = AutoModelForCausalLM.from_pretrained(moe_dir)
    prompt = torch.tensor(request.prompt.astype(np.int64))[None]
    with torch.no_grad():
        wanted = reference.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=12, eos_token_id=None
        )[0, 12:].tolist()
        logits = reference(torch.tensor([request.prompt.tolist() + wanted])).logits[0, 11:-1]
    assert got.tokens == wanted
    assert got.end.mask.ids.tolist() == wanted
    assert np.allclose(got.logprobs, logits.log_softmax(-1).amax(-1), atol=1e-4)


def test_children_share_a_prompt_and_differ(make_runner: Make, ask: Ask) -> None:
    runner = make_runner().submit(ask(n=4, seed=7, max_tokens=12, **EVERYTHING))
    done = runner.finish()
    assert sorted(i for _, i in done) == [0, 1, 2, 3]
    assert len({tuple(f.tokens) for f in done.values()}) == 4
    assert sum(f.prompt_logprobs is not None for f in done.values()) == 1
    for i in range(4):
        alone = make_runner().submit(ask(n=1, seed=7 + i, max_tokens=12)).only()
        assert done["r", i].tokens == alone.tokens  # child i is drawn from seed + i
    assert runner.core.slots.slots >= 4


def test_without_a_seed_two_requests_differ(make_runner: Make, ask: Ask) -> None:
    runner = make_runner().submit(*[ask("r", seed=None, max_tokens=12, n=2)])
    a, b = runner.finish().values()
    assert a.tokens != b.tokens


def test_the_end_of_sequence_id_stops_unless_ignored(make_runner: Make, ask: Ask) -> None:
    bias = ((tiny.EOS_ID, 100.0),)
    stopped = make_runner().submit(ask(logit_bias=bias, ignore_eos=False)).only()
    assert (stopped.tokens, stopped.end.finish_reason, stopped.end.stop_reason) == ([tiny.EOS_ID], "stop", None)
    ignored = make_runner().submit(ask(logit_bias=bias, ignore_eos=True)).only()
    assert (len(ignored.tokens), ignored.end.finish_reason) == (8, "length")


def test_a_stop_id_stays_in_the_tokens_and_is_the_reason(make_runner: Make, ask: Ask) -> None:
    got = make_runner().submit(ask(logit_bias=((50, 100.0),), stop_token_ids=frozenset([50]))).only()
    assert (got.tokens, got.end.finish_reason, got.end.stop_reason) == ([50], "stop", 50)


def test_min_tokens_keeps_ending_ids_out_until_then(make_runner: Make, ask: Ask) -> None:
    got = make_runner().submit(
        ask(logit_bias=((50, 100.0), (tiny.EOS_ID, 90.0)), stop_token_ids=frozenset([50]), ignore_eos=False,
            min_tokens=3, sampling_mask=True)
    ).only()  # fmt: skip
    assert len(got.tokens) == 4
    assert got.tokens[-1] == 50
    assert not {50, tiny.EOS_ID} & set(got.tokens[:-1])


def test_allowed_ids_are_the_whole_support_and_others_are_floored(make_runner: Make, ask: Ask) -> None:
    got = make_runner().submit(ask(allowed_token_ids=(7,), logprobs=5, max_tokens=3, sampling_mask=True)).only()
    assert got.tokens == [7, 7, 7]
    assert got.end.mask.ids.tolist() == [7, 7, 7]
    assert got.logprobs == [0.0, 0.0, 0.0]
    assert got.floored == 12
    assert sorted(set(got.alternatives.values.tolist())) == [-9999.0, 0.0]
    assert got.alternatives.offsets.tolist() == [0, 5, 10, 15]


def test_alternatives_are_the_likeliest_in_order(make_runner: Make, ask: Ask) -> None:
    got = make_runner().submit(ask(controls=Controls(temperature=0), logprobs=3)).only()
    values = got.alternatives.values.reshape(-1, 3)
    assert (np.diff(values, axis=1) <= 0).all()
    assert got.alternatives.ids.reshape(-1, 3)[:, 0].tolist() == got.tokens
    assert got.alternatives.ranks.reshape(-1, 3).tolist() == [[1, 2, 3]] * 8


def test_named_ids_replace_the_likeliest(make_runner: Make, ask: Ask) -> None:
    everything = make_runner().submit(ask(logprobs=tiny.VOCABULARY)).only()
    got = make_runner().submit(ask(logprobs=0, logprob_token_ids=(30, 500))).only()
    assert got.alternatives.ids.reshape(-1, 2).tolist() == [[30, 500]] * 8
    for t in range(8):
        row = slice(*everything.alternatives.offsets[t : t + 2])
        where = everything.alternatives.ids[row].tolist().index(500)
        assert everything.alternatives.values[row][where] == pytest.approx(got.alternatives.values[2 * t + 1], abs=1e-4)
        assert everything.alternatives.ranks[row][where] == got.alternatives.ranks[2 * t + 1]


def test_routes_start_where_asked(make_runner: Make, ask: Ask) -> None:
    whole = make_runner().submit(ask(routed_experts=True)).only().end.routes
    part = make_runner().submit(ask(routed_experts=True, routes_start=9)).only().end.routes
    assert part.start == 9
    assert part.array.shape == (12 + 8 - 1 - 9, 2, 2)
    assert np.array_equal(part.array, whole.array[9:])


def test_a_stop_string_ends_and_its_token_stays(make_runner: Make, ask: Ask, moe_dir: Path) -> None:
    tokenizer = make_runner().core.tokenizer
    free = make_runner().submit(ask(max_tokens=30)).only()
    text = tokenizer.decode(free.tokens[:6])
    stop = text[-2:]
    got = make_runner().submit(ask(max_tokens=30, stop=(stop,))).only()
    assert (got.end.finish_reason, got.end.stop_reason) == ("stop", stop)
    assert got.tokens == free.tokens[: len(got.tokens)]
    assert stop in tokenizer.decode(got.tokens)
    assert stop not in tokenizer.decode(got.tokens[:-1])


def test_stop_strings_without_a_tokenizer_are_refused(make_runner: Make, ask: Ask) -> None:
    runner = make_runner()
    runner.core.tokenizer = None
    with pytest.raises(InvalidRequest, match="stop_token_ids"):
        runner.submit(ask(stop=("x",)))


def test_a_long_prompt_does_not_stall_those_who_run(make_runner: Make, ask: Ask) -> None:
    runner = make_runner(chunk_tokens=8).submit(ask("short", max_tokens=20, stream=True)).steps(2)
    runner.submit(ask("long", 80, max_tokens=2)).steps(5)
    assert runner.core.scheduler.partial is not None
    assert len(runner.done["short", 0].tokens) == 6  # one token per step beside the long prompt's chunks


def test_lower_priority_numbers_start_first(make_runner: Make, ask: Ask) -> None:
    runner = make_runner(max_slots=1).submit(ask("late", priority=5), ask("early", priority=-1), ask("mid"))
    assert list(runner.finish()) == [("early", 0), ("mid", 0), ("late", 0)]


def test_a_unary_request_is_reported_once_and_a_stream_in_pieces(make_runner: Make, ask: Ask) -> None:
    runner = make_runner().submit(ask("unary", **EVERYTHING))
    runner.submit(ask("stream", stream=True, logprobs=2, sampling_mask=True, routed_experts=True))
    done = runner.finish()
    assert done["unary", 0].pieces == 1
    assert done["stream", 0].pieces == 8
    assert len(done["stream", 0].tokens) == len(done["stream", 0].logprobs) == 8
    again = make_runner().submit(ask("stream", logprobs=2, sampling_mask=True, routed_experts=True)).only()
    assert again.tokens == done["stream", 0].tokens
    assert np.array_equal(again.end.routes.array, done["stream", 0].end.routes.array)


def test_a_sample_whose_own_logprob_is_not_finite_is_an_error(make_runner: Make, ask: Ask, moe_dir: Path) -> None:
    model = load_model(moe_dir)
    with torch.no_grad():
        model.module.get_output_embeddings().weight.fill_(float("nan"))  # type: ignore[operator]
    runner = make_runner(model).submit(ask(logprobs=0))
    got = runner.only()
    assert got.end.finish_reason == "error"
    assert "not finite" in got.end.error
    assert not runner.core.scheduler.busy


def test_a_dense_model_generates_without_routes(make_runner: Make, ask: Ask, dense_dir: Path) -> None:
    runner = make_runner(load_model(dense_dir))
    assert len(runner.submit(ask(logprobs=1, sampling_mask=True)).only().tokens) == 8


def test_bfloat16_keeps_the_invariants(make_runner: Make, ask: Ask, moe_dir: Path) -> None:
    runner = make_runner(load_model(moe_dir, dtype="bfloat16"), max_slots=4, chunk_tokens=16)
    done = runner.submit(*mixed_requests(ask, 8)).finish()
    for found in done.values():
        mask, routes = found.end.mask, found.end.routes
        for t, token in enumerate(found.tokens):
            assert token in mask.ids[mask.offsets[t] : mask.offsets[t + 1]]
        assert np.isfinite(found.logprobs).all()
        assert (routes.array[..., 0] != routes.array[..., 1]).all()
