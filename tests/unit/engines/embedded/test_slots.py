import torch

from rollplane.engines.embedded.model import ModelShape
from rollplane.engines.embedded.slots import DecodeCache, PrefillCache, SlotTable

SHAPE = ModelShape(
    vocab_tokens=50, context_tokens=300, layers=2, kv_heads=1, head_dim=4, moe_layers=2, experts=4, experts_per_token=2
)


def table(max_slots: int = 16) -> SlotTable:
    return SlotTable(SHAPE, max_slots=max_slots, dtype=torch.float32)


def test_growing_keeps_what_is_held_and_zeroes_the_rest() -> None:
    t = table()
    t.begin(3, torch.arange(5))
    t.kv[:, :, 3, :, :5] = 7.0
    t.reserve(slots=9, tokens=200)
    assert repr(t) == "<SlotTable 16/16 slots x 256 tokens>"
    assert t.tokens[3, :5].tolist() == [0, 1, 2, 3, 4]
    assert (t.kv[:, :, 3, :, :5] == 7).all()
    assert not t.kv[:, :, 3, :, 5:].any()


def test_growth_stops_at_the_limits() -> None:
    t = table(max_slots=10)
    t.reserve(slots=10, tokens=300)
    assert (t.slots, t.capacity_tokens) == (10, 300)


def test_a_move_copies_all_a_slot_holds() -> None:
    t = table()
    t.reserve_alternatives(2)
    t.begin(1, torch.arange(6))
    for array in (t.routes, t.logprobs, t.ranks, t.alt_ids, t.alt_ranks, t.alt_values):
        array[1] = 3
    t.kv[:, :, 1] = 3
    t.move(1, 0)
    assert int(t.lengths[0]) == 6
    for array in (t.tokens, t.routes, t.logprobs, t.ranks, t.alt_ids, t.alt_ranks, t.alt_values):
        assert torch.equal(array[0, :6], array[1, :6])
    assert torch.equal(t.kv[:, :, 0, :, :6], t.kv[:, :, 1, :, :6])


def test_a_decode_step_writes_one_position_and_reads_a_view() -> None:
    t = table()
    cache = DecodeCache(t, torch.tensor([2, 5]))
    k = torch.ones(2, 1, 1, 4)
    keys, values = cache.update(k, 2 * k, 1)
    assert keys.shape == (2, 1, 6, 4)
    assert keys.data_ptr() == t.kv[1, 0].data_ptr()
    assert keys[:, 0, :, 0].tolist() == [[0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 0, 1]]
    assert values[1, 0, 5, 0] == 2
    assert not t.kv[0].any()


def test_a_prefill_step_keeps_only_valid_tokens() -> None:
    t = table()
    valid = torch.tensor([[True, True, True], [False, False, True]])
    positions = torch.tensor([[0, 1, 2], [3, 3, 4]])
    k = torch.arange(1, 7, dtype=torch.float32).view(2, 1, 3, 1).expand(-1, -1, -1, 4)
    first = PrefillCache(t, slots=torch.tensor([4, 2]), valid=valid, positions=positions, history=False)
    assert first.update(k, k, 0)[0] is k
    again = PrefillCache(t, slots=torch.tensor([4, 2]), valid=valid, positions=positions, history=True)
    keys, _ = again.update(k, k, 0)
    assert keys[:, 0, :, 0].tolist() == [[1, 2, 3, 0, 0], [0, 0, 0, 0, 6]]
