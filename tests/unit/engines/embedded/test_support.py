import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollplane.engines.embedded.sampler import NEG_INF, Controls, RowControls, draw, support_of, truncate
from rollplane.engines.embedded.support import Support

VOCAB = 64

logits = st.one_of(st.integers(-6, 6).map(float), st.floats(-5, 5, width=32), st.just(NEG_INF))  # ties, and banned ids
rows_of_logits = st.lists(st.lists(logits, min_size=VOCAB, max_size=VOCAB), min_size=1, max_size=3).filter(
    lambda rows: all(max(row) > NEG_INF for row in rows)
)
controls = st.builds(
    Controls,
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.sampled_from([1, 2, 5, 9]),
    top_p=st.sampled_from([1.0, 0.8, 0.31]),
    min_p=st.sampled_from([0.0, 0.3]),
)


@given(rows=rows_of_logits, data=st.data())
def test_packed_or_not_the_answers_are_the_same(rows: list[list[float]], data: st.DataObject) -> None:
    c = RowControls([data.draw(controls) for _ in rows], vocab=VOCAB)
    support = Support(torch.tensor(rows), c)
    processed = truncate(torch.tensor(rows), c)
    whole = processed.log_softmax(-1)
    logprobs = support.logits.log_softmax(-1)
    assert torch.allclose(support.spread(logprobs), whole, atol=1e-6)
    uniforms = torch.full((len(rows),), data.draw(st.floats(0, 0.999)), dtype=torch.float64)
    sampled = support.ids(draw(logprobs, uniforms, c)[:, None])[:, 0]
    assert (whole.gather(1, sampled[:, None]) > NEG_INF).all()
    ids, counts = support.masks(sampled)
    wanted, wanted_counts = support_of(processed, sampled, c)
    assert ids.tolist() == wanted.tolist()
    assert ids.dtype == np.int32
    assert counts == wanted_counts.tolist()
    for width in (1, 3, 12):
        _, values = support.topk(logprobs, width)
        assert torch.allclose(values, whole.topk(width, dim=-1).values, atol=1e-6)


def test_rows_with_a_top_k_each_are_packed_in_rising_id_order() -> None:
    x = torch.zeros(2, VOCAB)
    x[0, [40, 7, 50]] = torch.tensor([3.0, 1.0, 2.0])
    x[1, [9, 3]] = 1.0
    support = Support(x, RowControls([Controls(top_k=3), Controls(top_k=2)], vocab=VOCAB))
    assert support.logits.tolist() == [[1.0, 3.0, 2.0], [1.0, 1.0, NEG_INF]]
    ids, counts = support.masks(torch.zeros(2, dtype=torch.int64))
    assert (ids.tolist(), counts) == ([7, 40, 50, 3, 9], [3, 2])


def test_padding_does_not_hide_id_zero() -> None:
    x = torch.zeros(2, VOCAB)
    x[0, [0, 5]], x[1, [0, 8, 9]] = 1.0, 2.0
    support = Support(x, RowControls([Controls(top_k=2), Controls(top_k=3)], vocab=VOCAB))
    assert support.logits.shape == (2, 3)
    assert (support.spread(support.logits) > NEG_INF).nonzero().tolist() == [[0, 0], [0, 5], [1, 0], [1, 8], [1, 9]]


def test_a_greedy_or_untruncated_row_keeps_the_batch_whole() -> None:
    x = torch.randn(2, VOCAB)
    for other in (Controls(temperature=0, top_k=2), Controls(), Controls(top_p=0.5), Controls(top_k=VOCAB - 1)):
        support = Support(x, RowControls([Controls(top_k=2), other], vocab=VOCAB))
        assert support.logits.shape == x.shape


def test_alternatives_past_a_support_are_other_ids_at_minus_infinity() -> None:
    x = torch.randn(1, VOCAB)
    support = Support(x, RowControls([Controls(top_k=2)], vocab=VOCAB))
    ids, values = support.topk(support.logits.log_softmax(-1), 5)
    assert len(set(ids[0].tolist())) == 5
    assert values[0].isfinite().tolist() == [True, True, False, False, False]


def test_a_row_that_is_not_a_number_stays_so() -> None:
    x = torch.randn(2, VOCAB)
    x[1, 4] = float("nan")
    logprobs = Support(x, RowControls([Controls(top_k=4, top_p=0.9)] * 2, vocab=VOCAB)).logits.log_softmax(-1)
    assert not logprobs[1].isfinite().any()
