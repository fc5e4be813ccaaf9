import random
from collections.abc import Callable

from rollplane.engines.embedded.scheduler import Chunk, Job, Scheduler, group_by_length
from rollplane.engines.embedded.sequence import Generation, Sequence

Ask = Callable[..., Generation]


def job(request: Generation) -> Job:
    sequences = [
        Sequence(request, index=i, rng=random.Random(0), eos_ids=frozenset(), rules=None, matcher=None)
        for i in range(request.n)
    ]
    return Job(request, sequences)


def computed(scheduler: Scheduler, *, generate: bool = True) -> list[tuple[str, int, int, int]]:
    """Plan a step, pretend it ran; (request, slot, start, end) of each chunk."""
    seen = []
    for chunk in scheduler.plan():
        owner = chunk.job or chunk.sequence
        assert owner is not None
        seen.append((owner.request.request_id, chunk.slot, chunk.start, chunk.end))
        owner.computed = chunk.end
        if chunk.job is not None and chunk.end == len(chunk.job.request.prompt):
            scheduler.join(chunk.job)
            for s in chunk.job.sequences:
                s.computed, s.generated = chunk.end, 1
    return seen


def test_prompts_are_computed_in_order_in_chunks(ask: Ask) -> None:
    s = Scheduler(max_slots=8, chunk_tokens=10)
    for name, length in (("a", 4), ("b", 15), ("c", 3)):
        s.add(job(ask(name, length)))
    assert computed(s) == [("a", 0, 0, 4), ("b", 1, 0, 6)]
    assert repr(s) == "<Scheduler 1 waiting, 1 prefilling, 1 running>"
    assert computed(s) == [("b", 1, 6, 15), ("c", 2, 0, 1)]
    assert computed(s) == [("c", 2, 1, 3)]
    assert computed(s) == []
    assert [q.slot for q in s.running] == [0, 1, 2]


def test_siblings_take_neighbouring_slots_and_the_next_prompt_goes_behind(ask: Ask) -> None:
    s = Scheduler(max_slots=8, chunk_tokens=100)
    s.add(job(ask("a", 4, n=3)))
    s.add(job(ask("b", 4)))
    assert computed(s) == [("a", 0, 0, 4), ("b", 3, 0, 4)]
    assert [(q.request.request_id, q.index, q.slot) for q in s.running] == [
        ("a", 0, 0), ("a", 1, 1), ("a", 2, 2), ("b", 0, 3),
    ]  # fmt: skip


def test_a_request_waits_until_all_its_sequences_fit(ask: Ask) -> None:
    s = Scheduler(max_slots=3, chunk_tokens=100)
    s.add(job(ask("a", 4, n=2)))
    s.add(job(ask("b", 4, n=2)))
    assert [c[0] for c in computed(s)] == ["a"]
    s.leave(s.running[0])
    assert computed(s) == [("b", 1, 0, 4)]


def test_the_last_fills_the_hole(ask: Ask) -> None:
    s = Scheduler(max_slots=8, chunk_tokens=100)
    for name in "abc":
        s.add(job(ask(name, 2)))
    computed(s)
    a, b, c = s.running
    assert s.leave(a) == (2, 0)
    assert s.running == [c, b]
    assert (c.slot, b.slot) == (0, 1)
    assert s.leave(b) is None


def test_held_starts_nothing_but_goes_on_with_a_started_prompt(ask: Ask) -> None:
    s = Scheduler(max_slots=8, chunk_tokens=3)
    s.add(job(ask("a", 5)))
    s.add(job(ask("b", 5)))
    computed(s)
    s.held = True
    assert computed(s) == [("a", 0, 3, 5)]
    assert computed(s) == []
    assert s.waiting == 1


def test_what_must_be_recomputed_comes_first_and_alone(ask: Ask) -> None:
    s = Scheduler(max_slots=8, chunk_tokens=6)
    s.add(job(ask("a", 6)))
    computed(s)
    s.add(job(ask("b", 4)))
    s.running[0].computed = 0
    assert not s.decodable
    assert computed(s) == [("a", 0, 0, 6)]
    assert s.decodable
    assert computed(s) == [("b", 1, 0, 4)]


def test_waiting_requests_are_taken_out_by_id(ask: Ask) -> None:
    s = Scheduler(max_slots=8, chunk_tokens=6)
    for name in "aba":
        s.add(job(ask(name)))
    assert len(s.remove_waiting("a")) == 2
    assert s.waiting == 1
    assert [j.request.request_id for j in s.remove_waiting(None)] == ["b"]


def test_at_most_half_of_a_forward_is_padding() -> None:
    chunks = [Chunk(slot, 0, size, None) for slot, size in enumerate([3, 100, 7, 50, 4, 49, 1])]
    sizes = [[c.end for c in group] for group in group_by_length(chunks)]
    assert sizes == [[100, 50], [49], [7, 4], [3], [1]]
