"""Placement by prefix, group, session and load, over the records of workers alone."""

from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.unit.rl.local_workers import LocalWorker

from rollplane.engines.mock.settings import MockSettings
from rollplane.protocol.request import GenerateRequest
from rollplane.rl.members import Member
from rollplane.router.pace import FORGOTTEN_AFTER_S, Pace, slowdowns
from rollplane.router.prefix_aware import PrefixAware, PrefixAwareSettings
from rollplane.router.worker import RoutedWorker
from rollplane.testing.clock import FakeClock
from rollplane.testing.requests import make_request


async def routed(count: int, **settings: Any) -> list[RoutedWorker]:
    workers = []
    for i in range(count):
        local = LocalWorker(f"http://w{i}", MockSettings(max_model_len=16_384, max_num_seqs=128, **settings))
        await local.start()
        workers.append(RoutedWorker(Member(local)))
    return workers


def prompt(seed: int, tokens: int = 8192) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(3, 30_000, tokens).astype(np.int32)


def place(policy: PrefixAware, request: GenerateRequest, workers: list[RoutedWorker]) -> RoutedWorker:
    worker = policy.choose(request, workers)
    worker.place(sequences=request.sampling.choices, tokens=request.prompt_tokens)
    policy.placed(request, worker)
    return worker


async def test_a_burst_of_one_prompt_goes_to_one_worker_before_any_event() -> None:
    """16 identical 8k prompts at once over 4 workers are computed about once."""
    workers, policy = await routed(4), PrefixAware()
    tokens = prompt(0)
    placed = [place(policy, make_request(tokens), workers) for _ in range(16)]
    assert len({worker.url for worker in placed}) == 1
    assert policy.index is not None
    pending = policy.index.pending_tokens()
    assert sum(pending.values()) == 8192


async def test_a_group_larger_than_the_cap_spills_over() -> None:
    workers, policy = await routed(4), PrefixAware()
    placed = Counter(place(policy, make_request(prompt(0)), workers).url for _ in range(128))
    assert max(placed.values()) <= 1.25 * 128 / 4 + 16


async def test_a_worker_without_a_free_slot_gets_no_more_than_a_prompt_is_worth() -> None:
    """A sample that finds no slot waits for another to end; computing the prompt elsewhere is sooner, but for a few."""
    workers, policy = await routed(2), PrefixAware(PrefixAwareSettings(sequence_tokens=1.0))
    home = place(policy, make_request(prompt(0, 4096)), workers)
    for worker in workers:
        worker.place(sequences=120 if worker is home else 110, tokens=0)
    placed = Counter(place(policy, make_request(prompt(0, 4096)), workers).url for _ in range(16))
    assert 128 <= home.sequences <= 128 + 4
    assert placed[home.url] < 16


async def test_a_long_common_prefix_does_not_defeat_load() -> None:
    """256 sessions that share 4k tokens, over 4 workers."""
    workers, policy = await routed(4), PrefixAware()
    shared = prompt(0, 4096)
    placed = Counter(
        place(
            policy,
            make_request(np.concatenate([shared, prompt(i + 1, 64)]), options={"session_id": f"s{i}"}),
            workers,
        ).url
        for i in range(256)
    )
    assert max(placed.values()) / (256 / 4) < 1.5


async def test_sessions_stay_while_balanced_and_drain_from_a_slow_worker() -> None:
    """A closed loop of 128 sessions over 4 workers; one of them becomes 5 times slower."""
    clock = FakeClock()
    workers, policy = await routed(4), PrefixAware(clock=clock)
    home: dict[int, RoutedWorker] = {}
    turns: dict[int, int] = dict.fromkeys(range(128), 0)

    def turn(session: int) -> bool:
        """The next request of a session, whose last one has just ended; whether it stayed."""
        turns[session] += 1
        tokens = prompt(session, 64 + 16 * turns[session])
        before = home.get(session)
        home[session] = place(policy, make_request(tokens, options={"session_id": f"s{session}"}), workers)
        return before is home[session]

    def end(session: int, seconds: float) -> None:
        worker = home[session]
        worker.release(sequences=1, tokens=64 + 16 * turns[session])
        worker.pace.add(seconds, tokens=100, now=clock())

    for session in turns:
        turn(session)
    stayed = 0
    for _ in range(3):
        clock._now += 1.0
        for session in turns:
            end(session, 1.0)
            stayed += turn(session)
    assert stayed == 3 * 128
    slow = home[0]
    for _ in range(8):
        clock._now += 1.0
        for session in turns:
            end(session, 5.0 if home[session] is slow else 1.0)
            turn(session)
    left = sum(worker is slow for worker in home.values())
    assert left < 128 / 4 / 2
    assert max(worker.sequences for worker in workers) / (128 / 4) < 1.6


async def test_a_slow_worker_keeps_its_cache_where_there_is_none_to_leave_for() -> None:
    workers, policy = await routed(5), PrefixAware(clock=FakeClock())
    for worker, pace_s in zip(workers, (1.0, 1.0, 1.0, 5.0, 5.0), strict=True):
        for _ in range(3):
            worker.pace.add(pace_s, tokens=100, now=policy._clock())
    slow = workers[4]
    for asked in (workers, workers[3:]):
        policy.choose(make_request(prompt(0)), asked)
        policy.placed(make_request(prompt(0)), slow)
        assert (policy.choose(make_request(prompt(0)), asked) is slow) == (asked is not workers)


async def test_a_new_generation_or_process_is_noticed_at_the_next_choice_whatever_the_events_say() -> None:
    """The index forgets though no event ever says that the cache is gone."""
    workers, policy = await routed(4), PrefixAware()
    tokens = prompt(0)
    warm = place(policy, make_request(tokens), workers)
    warm.release(sequences=1, tokens=8192)
    assert policy.choose(make_request(tokens), workers) is warm
    assert policy.placed(make_request(tokens), warm) == 8176
    local = warm.member.worker
    assert isinstance(local, LocalWorker)
    await local.flush_cache()
    await local.refresh()
    assert policy.placed(make_request(tokens), warm) == 0
    assert policy.placed(make_request(tokens), warm) == 8176
    await local.restart()
    assert policy.placed(make_request(tokens), warm) == 0


async def test_the_last_answer_of_a_worker_that_is_gone_brings_nothing_of_it_back() -> None:
    workers, policy = await routed(2), PrefixAware()
    request = make_request(prompt(0))
    gone = place(policy, request, workers)
    gone.member.enter("gone")
    policy.forget(gone)
    assert policy.index is not None
    assert policy.index.worker_count == 1
    local = LocalWorker(gone.url, MockSettings())
    await local.start()
    successor = RoutedWorker(Member(local))
    assert policy.placed(make_request(prompt(0)), successor) == 0
    policy.answered(request, gone)
    assert policy.placed(make_request(prompt(0)), successor) == 8176
    policy.forget(successor)
    policy.answered(request, gone)
    assert (gone in policy._seen, policy.index.worker_count) == (False, 1)


async def test_salts_adapters_and_versions_are_other_prefixes() -> None:
    workers, policy = await routed(2), PrefixAware()
    tokens = prompt(0, 1024)

    def expected(request: GenerateRequest) -> int | None:
        return policy.placed(request, workers[0])

    policy.choose(make_request(tokens), workers)
    assert expected(make_request(tokens)) == 0
    assert expected(make_request(tokens)) == 1008
    assert expected(make_request(tokens, fields={"cache_salt": "s"})) == 0
    assert expected(make_request(tokens, fields={"cache_salt": "s"})) == 1008
    state = workers[0].member.worker.state
    assert state is not None
    workers[0].member.worker.state = msgspec.structs.replace(state, salt_scope="v2")  # type: ignore[misc]
    assert expected(make_request(tokens)) == 0


async def test_what_engines_do_not_read_from_their_cache_is_not_expected_from_it() -> None:
    workers, policy = await routed(1), PrefixAware()
    tokens = prompt(0, 1024)
    policy.placed(make_request(tokens), workers[0])
    assert policy.placed(make_request(tokens, prompt_logprobs=0), workers[0]) == 0
    assert policy.placed(make_request(tokens, skip_reading_prefix_cache=True), workers[0]) == 0
    assert policy.placed(make_request(tokens), workers[0]) == 1008


async def test_a_worker_with_another_block_size_is_placed_by_load_only() -> None:
    workers = [*await routed(1), *await routed(1, block_tokens=32)]
    workers[1].member.worker.url = "http://other"  # type: ignore[misc]
    policy = PrefixAware()
    tokens = prompt(0, 1024)
    policy.choose(make_request(tokens), workers)
    assert policy.placed(make_request(tokens), workers[1]) is None
    assert policy.placed(make_request(tokens), workers[0]) == 0
    assert policy.choose(make_request(tokens), workers) is workers[0]


async def test_workers_without_a_block_cache_are_placed_by_load() -> None:
    workers, policy = await routed(3, cache_blocks=0), PrefixAware()
    placed = Counter(place(policy, make_request(prompt(0)), workers).url for _ in range(9))
    assert policy.index is None
    assert set(placed.values()) == {3}


async def test_short_prompts_of_one_group_are_placed_together() -> None:
    workers, policy = await routed(4), PrefixAware()
    groups = {
        group: {
            place(policy, make_request([group] * 8, options={"group_id": f"g{group}"}), workers).url for _ in range(8)
        }
        for group in range(8)
    }
    assert all(len(urls) == 1 for urls in groups.values())
    assert Counter(next(iter(urls)) for urls in groups.values()) == {f"http://w{i}": 2 for i in range(4)}


async def test_equal_workers_take_turns() -> None:
    workers, policy = await routed(3), PrefixAware()
    placed = [place(policy, make_request(prompt(i, 64)), workers).url for i in range(6)]
    assert Counter(placed) == {f"http://w{i}": 2 for i in range(3)}


async def test_the_weights_of_the_terms_are_settings() -> None:
    workers = await routed(2)
    policy = PrefixAware(PrefixAwareSettings(load_slack=1, load_factor=1.0))
    placed = Counter(place(policy, make_request(prompt(0)), workers).url for _ in range(20))
    assert max(placed.values()) <= 11


def test_a_pace_is_a_moving_mean_that_short_answers_do_not_move() -> None:
    pace = Pace()
    pace.add(2.0, tokens=100, now=1.0)
    pace.add(50.0, tokens=1, now=1.0)
    assert pace.s_per_token == pytest.approx(0.02)
    pace.add(6.0, tokens=100, now=2.0)
    assert repr(pace) == "<Pace 30.0 ms per token over 2 answers>"


async def test_only_clearly_slow_workers_count_as_more_loaded_and_only_for_a_while() -> None:
    workers = await routed(4)
    for worker, pace_s in zip(workers, (1.0, 1.2, 1.0, 5.0), strict=True):
        for _ in range(3):
            worker.pace.add(pace_s, tokens=100, now=10.0)
    assert {worker.url: round(by, 1) for worker, by in slowdowns(workers, now=11.0).items()} == {"http://w3": 4.5}
    assert slowdowns(workers, now=11.0 + FORGOTTEN_AFTER_S) == {}
