"""Deltas that waited for their reader become one; nothing is lost, moved past an error, or told after its choice ended."""

from typing import Any

import numpy as np

from rollplane.engines.grpc.calls import joined
from rollplane.errors import EngineDied
from rollplane.protocol.artifacts import TokenLogprobs
from rollplane.protocol.events import ChoiceEvent


def delta(*ids: int, index: int = 0, finish: Any = None) -> ChoiceEvent:
    values = np.array([-0.5 * i for i in ids], np.float32)
    return ChoiceEvent(
        index=index,
        token_ids=np.array(ids, np.int32),
        logprobs=TokenLogprobs(values=values, ranks=np.ones(len(ids), np.int32)),
        finish_reason=finish,
        policy_versions=[("v", 0)] if finish else [],
    )


def told(events: list[Any]) -> list[Any]:
    return [
        (e.index, e.token_ids.tolist(), e.logprobs.values.tolist(), e.finish_reason)
        if isinstance(e, ChoiceEvent)
        else e
        for e in events
    ]


def test_deltas_of_a_choice_become_one_and_the_terminal_one_with_them() -> None:
    found = joined([delta(1), delta(7, index=1), delta(2, 3), delta(4, finish="length"), None])
    assert told(found) == [
        (0, [1, 2, 3, 4], [-0.5, -1.0, -1.5, -2.0], "length"),
        (1, [7], [-3.5], None),
        None,
    ]
    assert found[0].policy_versions == [("v", 0)]  # type: ignore[union-attr]


def test_what_came_before_an_error_is_told_before_it() -> None:
    died = EngineDied("gone")
    assert told(joined([delta(1), delta(2), died])) == [(0, [1, 2], [-0.5, -1.0], None), died]


def test_one_event_is_handed_on_as_it_is() -> None:
    only = delta(1)
    assert joined([only]) == [only]
    assert joined([None]) == [None]
