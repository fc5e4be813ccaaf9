import numpy as np
import pytest

from rollplane.engines.grpc.packed import FEW, extend_field
from rollplane.engines.grpc.proto import inference_pb2 as pb

EDGES = [0, 1, 2**7 - 1, 2**7, 2**14 - 1, 2**14, 2**21 - 1, 2**21, 2**28 - 1, 2**28, 2**31 - 1]


@pytest.mark.parametrize("count", [1, FEW, FEW + 1, 5 * FEW])
@pytest.mark.parametrize("edges", range(1, len(EDGES) + 1))
def test_a_field_from_an_array_is_the_one_from_a_list(count: int, edges: int) -> None:
    ids = np.random.default_rng(count).choice(np.array(EDGES[:edges], dtype=np.int32), count)
    found, expected = pb.GenerateRequest(), pb.GenerateRequest()

    extend_field(found.token_ids, "ids", ids)
    expected.token_ids.ids.extend(ids.tolist())

    assert found == expected
    assert found.SerializeToString() == expected.SerializeToString()
    assert list(found.token_ids.ids) == ids.tolist()


def test_every_width_alone_is_written() -> None:
    for value in EDGES:
        ids = np.full(FEW + 1, value, dtype=np.int32)
        found = pb.TokenIds()
        extend_field(found, "ids", ids)
        assert list(found.ids) == ids.tolist()


@pytest.mark.parametrize("count", [1, FEW, FEW + 1, 5 * FEW])
@pytest.mark.parametrize("value", [-1, -(2**31)])
def test_a_negative_number_is_refused_however_many_there_are(count: int, value: int) -> None:
    ids = np.full(count, 7, dtype=np.int32)
    ids[-1] = value

    with pytest.raises(ValueError, match="-"):
        extend_field(pb.TokenIds(), "ids", ids)
