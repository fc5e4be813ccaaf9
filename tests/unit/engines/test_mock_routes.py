import numpy as np
import pytest

from rollplane.engines.mock.routes import Router
from rollplane.protocol.info import MoeShape

TOKENS = np.arange(300, dtype=np.int32)


@pytest.mark.parametrize(
    ("experts", "dtype"), [(8, np.uint8), (256, np.uint8), (257, np.uint16), (512, np.uint16), (70_000, np.int32)]
)
def test_expert_ids_travel_in_the_narrowest_type_that_holds_them(experts: int, dtype: type) -> None:
    router = Router(MoeShape(layers=4, top_k=4, num_experts=experts))

    routes = router.capture([(1, 0)], TOKENS, TOKENS[:5], start=0)

    assert routes.array.dtype == dtype
    assert routes.array.shape == (304, 4, 4)
    assert int(routes.array.max()) < experts
    assert int(routes.array.max()) > experts * 0.8


@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_a_row_never_repeats_an_expert(top_k: int) -> None:
    rows = Router(MoeShape(layers=3, top_k=top_k, num_experts=12)).rows(1, TOKENS, position=0)

    assert (np.diff(np.sort(rows, axis=2), axis=2) > 0).all()
    assert rows.any()


def test_equal_tokens_at_equal_positions_have_equal_rows() -> None:
    router = Router(MoeShape(layers=2, top_k=2, num_experts=64))

    whole, tail = router.rows(1, TOKENS, position=0), router.rows(1, TOKENS[100:], position=100)

    np.testing.assert_array_equal(whole[100:], tail)
    assert (router.rows(2, TOKENS, position=0) != whole).any()


def test_rows_are_those_of_the_weights_that_ran_the_token() -> None:
    """The last token before an update is forwarded after it, by the new weights."""
    router = Router(MoeShape(layers=2, top_k=2, num_experts=64))
    prompt, output = TOKENS[:10], TOKENS[20:28]
    old, new = (router.capture([(scope, 0)], prompt, output, start=0).array for scope in (1, 2))

    mixed = router.capture([(1, 0), (2, 3)], prompt, output, start=0).array

    np.testing.assert_array_equal(mixed[:12], old[:12])
    np.testing.assert_array_equal(mixed[12:], new[12:])
    tail = router.capture([(1, 0), (2, 3)], prompt, output, start=8).array
    np.testing.assert_array_equal(tail, mixed[8:])


def test_no_output_has_no_rows() -> None:
    routes = Router(MoeShape(layers=2, top_k=3, num_experts=512)).capture([], TOKENS, TOKENS[:0], start=7)

    assert routes.array.shape == (0, 2, 3)
    assert routes.array.dtype == np.uint16
    assert routes.start == 7
