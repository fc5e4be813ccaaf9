import pytest

from rollplane.errors import InvalidRequest
from rollplane.rl.topology import Parallelism, rank_offsets, receivers


@pytest.mark.parametrize(
    ("sizes", "count"), [((1, 1, 1), 1), ((2, 1, 1), 2), ((1, 2, 1), 2), ((2, 2, 2), 8), ((4, 1, 2), 8)]
)
def test_receivers_are_tensor_times_pipeline_times_prefill_context(sizes: tuple[int, int, int], count: int) -> None:
    tensor, pipeline, prefill = sizes
    assert receivers(Parallelism(tensor=tensor, pipeline=pipeline, prefill_context=prefill)) == count


def test_data_parallelism_and_the_external_launcher_are_refused_with_a_sentence() -> None:
    with pytest.raises(InvalidRequest, match="data parallelism 2"):
        receivers(Parallelism(data=2))
    with pytest.raises(InvalidRequest, match="external launcher"):
        receivers(Parallelism(external_launcher=True))


def test_rank_offsets_are_contiguous_and_sum_to_the_total() -> None:
    sizes = [1, 2, 2, 4]
    offsets = rank_offsets(sizes)
    assert offsets == [0, 1, 3, 5]
    assert offsets[-1] + sizes[-1] == sum(sizes)


def test_a_world_size_of_zero_is_refused_not_guessed() -> None:
    with pytest.raises(InvalidRequest, match=r"world_sizes\[1\] must be >= 1, got 0"):
        rank_offsets([1, 0])
