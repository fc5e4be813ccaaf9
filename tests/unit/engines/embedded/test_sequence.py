import random
from collections.abc import Callable

import torch

from rollplane.engines.embedded.sequence import Generation, LogitRules, Sequence, child_rng

Ask = Callable[..., Generation]


def sequence(request: Generation, eos: frozenset[int] = frozenset()) -> Sequence:
    return Sequence(request, index=0, rng=random.Random(0), eos_ids=eos, rules=None, matcher=None)


def test_a_plain_request_needs_no_rules(ask: Ask) -> None:
    assert not LogitRules.needed(ask())
    assert LogitRules.needed(ask(min_tokens=1))


def test_rules_are_applied_in_order(ask: Ask) -> None:
    request = ask(
        prompt=[8, 9], allowed_token_ids=(1, 2, 8), logit_bias=((8, 4.0),), repetition_penalty=2.0, min_tokens=1,
        stop_token_ids=frozenset([2]),
    )  # fmt: skip
    rules = LogitRules(request, vocab=10, eos_ids=frozenset())
    row = torch.ones(10)
    rules.apply(row, generated=0)
    assert {i: v for i, v in enumerate(row.tolist()) if v != float("-inf")} == {1: 1.0, 8: 2.5}
    row = torch.ones(10)
    rules.apply(row, generated=1)
    assert row[2] == 1.0


def test_penalties_count_what_was_generated(ask: Ask) -> None:
    rules = LogitRules(ask(prompt=[1], presence_penalty=1.0, frequency_penalty=0.5), vocab=4, eos_ids=frozenset())
    for token in (2, 2, 3):
        rules.observe(token)
    row = torch.zeros(4)
    rules.apply(row, generated=3)
    assert row.tolist() == [0.0, 0.0, -2.0, -1.5]


def test_spans_change_only_where_a_token_was_made(ask: Ask) -> None:
    s = sequence(ask(max_tokens=5))
    for version in ("v0", "v0", "v2", "v3", "v3"):
        s.accept(9, version=version)
    assert s.spans == [("v0", 0), ("v2", 2), ("v3", 3)]
    assert s.finish_reason == "length"


def test_end_of_sequence_goes_before_a_stop_id(ask: Ask) -> None:
    s = sequence(ask(stop_token_ids=frozenset([2])), eos=frozenset([2]))
    s.accept(2, version="v")
    assert (s.finish_reason, s.stop_reason) == ("stop", None)


def test_recomputed_rows_are_counted_from_the_start(ask: Ask) -> None:
    s = sequence(ask())
    for rows in (7, 12):
        s.recompute(rows)
    assert (s.computed, s.recomputed_rows) == (12, 12)
    s.recompute(3)
    assert (s.computed, s.recomputed_rows) == (3, 12)


def test_children_draw_from_seed_plus_index() -> None:
    assert child_rng(7, 2).random() == child_rng(9, 0).random()
    assert child_rng(7, 0).random() != child_rng(8, 0).random()
    assert child_rng(-1, 0).random() != child_rng(1, 0).random()
    assert child_rng(None, 0).random() != child_rng(None, 0).random()
