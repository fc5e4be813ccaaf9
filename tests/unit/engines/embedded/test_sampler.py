import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollplane.engines.embedded.sampler import (
    NEG_INF,
    Controls,
    RowControls,
    draw,
    penalize,
    rank_of,
    support_of,
    truncate,
)

VOCAB = 24

rows_of_logits = st.lists(
    st.lists(st.integers(-6, 6), min_size=VOCAB, max_size=VOCAB), min_size=1, max_size=4
)  # integers: many ties
controls = st.builds(
    Controls,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 5, VOCAB, VOCAB + 9]),
    top_p=st.sampled_from([1.0, 0.97, 0.8, 0.31, 0.05]),
    min_p=st.sampled_from([0.0, 0.013, 0.3]),
)


def naive_support(row: list[float], c: Controls) -> set[int]:
    """The definition, one id at a time, in double precision."""
    if c.temperature == 0:
        return {i for i, x in enumerate(row) if x == max(row)}
    x = [v / c.temperature for v in row]
    kept = {i for i in range(len(x)) if math.exp(x[i] - max(x)) >= c.min_p}
    if 0 < c.top_k < len(x):
        floor = sorted((x[i] for i in kept), reverse=True)[: c.top_k][-1]
        kept = {i for i in kept if x[i] >= floor}
    if c.top_p < 1:
        total = sum(math.exp(x[i]) for i in kept)
        nucleus: set[int] = set()
        mass = 0.0
        for value in sorted({x[i] for i in kept}, reverse=True):
            for i in sorted(kept):
                if x[i] == value and mass < c.top_p:
                    nucleus |= {j for j in kept if x[j] == value}  # equals stay together
                    mass += math.exp(value) / total
        kept = nucleus
    return kept


@given(rows=rows_of_logits, data=st.data())
def test_supports_are_those_of_the_definition(rows: list[list[int]], data: st.DataObject) -> None:
    asked = [data.draw(controls) for _ in rows]
    rc = RowControls(asked, vocab=VOCAB)
    processed = truncate(torch.tensor(rows, dtype=torch.float32), rc)
    sampled = processed.argmax(-1)
    ids, counts = support_of(processed, sampled, rc)
    parts = [set(p.tolist()) for p in ids.split(counts.tolist())]
    for row, c, got, token in zip(rows, asked, parts, sampled.tolist(), strict=True):
        if c.temperature == 0:
            assert got == {token}
            assert token in naive_support([float(v) for v in row], c)
        else:
            assert got == naive_support([float(v) for v in row], c)


@given(rows=st.lists(st.lists(st.floats(-5, 5, width=32), min_size=VOCAB, max_size=VOCAB), min_size=2, max_size=4),
       data=st.data())  # fmt: skip
def test_a_row_is_treated_alike_alone_and_in_company(rows: list[list[float]], data: st.DataObject) -> None:
    asked = [data.draw(controls) for _ in rows]
    together = truncate(torch.tensor(rows), RowControls(asked, vocab=VOCAB))
    for row, c, got in zip(rows, asked, together, strict=True):
        assert torch.equal(truncate(torch.tensor([row]), RowControls([c], vocab=VOCAB))[0], got)


def test_a_nucleus_wider_than_the_first_look_is_found_by_sorting() -> None:
    logits = torch.linspace(0, 1, 5000)[None]
    kept = truncate(logits, RowControls([Controls(top_p=0.9)], vocab=5000)) > NEG_INF
    probabilities = logits.double().softmax(-1)[0].flip(0)
    wanted = int((probabilities.cumsum(0) - probabilities < 0.9).sum())
    assert int(kept.sum()) == wanted > 1024
    assert kept[0, -wanted:].all()


def test_ties_beyond_the_kth_count_in_the_mass_of_the_nucleus() -> None:
    # Kept by top-k 2: 2, 1, 1, 1 with probabilities .475, .175, .175, .175; the first alone is below 0.6.
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    kept = truncate(logits, RowControls([Controls(top_k=2, top_p=0.6)], vocab=5)) > NEG_INF
    assert kept.tolist() == [[True, True, True, True, False]]


def test_neutral_controls_leave_the_row_alone() -> None:
    logits = torch.randn(2, VOCAB)
    assert torch.equal(truncate(logits, RowControls([Controls(), Controls(top_k=VOCAB)], vocab=VOCAB)), logits)


@given(u=st.floats(0, 1, exclude_max=True), row=st.lists(st.integers(-40, 4), min_size=VOCAB, max_size=VOCAB))
def test_a_draw_is_the_inverse_of_the_cumulative_distribution(u: float, row: list[int]) -> None:
    logprobs = torch.tensor([row], dtype=torch.float32).log_softmax(-1)
    logprobs[0, ::3] = NEG_INF
    token = int(draw(logprobs, torch.tensor([u], dtype=torch.float64), RowControls([Controls()], vocab=VOCAB))[0])
    p = np.exp(logprobs[0].double().numpy())
    before, after = p[:token].sum(), p[: token + 1].sum()
    assert p[token] > 0
    assert before / p.sum() <= u + 1e-9
    assert u <= after / p.sum() + 1e-9


def test_draws_follow_the_distribution() -> None:
    logprobs = torch.tensor([[0.1, 0.6, 0.0, 0.3]]).log()
    uniforms = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    rc = RowControls([Controls()] * 10_000, vocab=4)
    counts = draw(logprobs.expand(10_000, -1), uniforms, rc).bincount(minlength=4)
    assert counts.tolist() == [1000, 6000, 0, 3000]


def test_greedy_takes_the_first_of_equal_maxima() -> None:
    logprobs = torch.tensor([[0.0, 2.0, 2.0], [3.0, 1.0, 3.0]])
    rc = RowControls([Controls(temperature=0)] * 2, vocab=3)
    assert draw(logprobs, torch.zeros(2, dtype=torch.float64), rc).tolist() == [1, 0]


def test_repetition_divides_positive_and_multiplies_negative_logits() -> None:
    row = torch.tensor([2.0, -2.0, 4.0, 0.0])
    seen = torch.tensor([True, True, False, True])
    penalize(row, seen=seen, counts=torch.zeros(4), repetition=2.0, presence=0.0, frequency=0.0)
    assert row.tolist() == [1.0, -4.0, 4.0, 0.0]


def test_presence_counts_once_and_frequency_each_time() -> None:
    row = torch.zeros(3)
    counts = torch.tensor([0.0, 1.0, 3.0])
    penalize(row, seen=counts > 0, counts=counts, repetition=1.0, presence=0.5, frequency=0.25)
    assert row.tolist() == [0.0, -0.75, -1.25]


def test_a_rank_is_one_more_than_the_likelier_ids() -> None:
    logprobs = torch.tensor([[-1.0, -2.0, -2.0, -0.5]])
    assert rank_of(logprobs, torch.tensor([[-0.5, -2.0]])).tolist() == [[1, 3]]
