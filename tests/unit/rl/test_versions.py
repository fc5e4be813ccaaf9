import numpy as np
import pytest

from rollplane.errors import PreconditionFailed
from rollplane.protocol.request import GenerateRequest, RequestOptions
from rollplane.protocol.sampling import SamplingParams
from rollplane.rl.versions import MAX_REMEMBERED, VersionSequence, check_version_wanted


def request(**options: str) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        token_ids=np.array([1], dtype=np.int32),
        sampling=SamplingParams(),
        options=RequestOptions(**options),  # type: ignore[arg-type]
    )


def test_the_order_of_versions_is_the_order_of_updates_not_of_names() -> None:
    sequence = VersionSequence("z")
    sequence.advance("a")
    assert sequence.at_least("a", "z")
    assert not sequence.at_least("z", "a")


def test_going_back_to_an_old_name_is_a_new_event() -> None:
    sequence = VersionSequence("v1")
    sequence.advance("v2")
    sequence.advance("v1")
    assert sequence.at_least("v1", "v2")


def test_a_version_that_has_not_happened_is_not_reached() -> None:
    assert not VersionSequence("v1").at_least("v1", "v9")


def test_memory_of_versions_is_bounded() -> None:
    sequence = VersionSequence("v")
    for i in range(MAX_REMEMBERED + 10):
        sequence.advance(f"v{i}")
    assert sequence.number("v") is None
    assert sequence.number(sequence.current) == MAX_REMEMBERED + 10


def test_an_exact_version_is_met_or_refused_with_what_exists() -> None:
    sequence = VersionSequence("v1")
    check_version_wanted(request(policy_version="v1"), "v1", sequence)
    with pytest.raises(PreconditionFailed, match="'v2' was asked for, this worker has 'v1'") as refused:
        check_version_wanted(request(policy_version="v2"), "v1", sequence)
    assert refused.value.details == {"policy_version": "v1"}


def test_a_least_version_is_met_by_later_ones() -> None:
    sequence = VersionSequence("v1")
    sequence.advance("v2")
    check_version_wanted(request(min_policy_version="v1"), "v2", sequence)
    with pytest.raises(PreconditionFailed, match="'v3' or later"):
        check_version_wanted(request(min_policy_version="v3"), "v2", sequence)
