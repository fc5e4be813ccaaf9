"""What the counters of whole answers say, which are handed over when somebody looks."""

import pytest

from rollplane.protocol.events import ServedBy
from rollplane.protocol.response import GenerateResponse, Usage
from rollplane.server.metrics import Metrics


def answer(*, prompt: int, completion: int) -> GenerateResponse:
    usage = Usage(prompt_tokens=prompt, completion_tokens=completion)
    return GenerateResponse(request_id="r", model="m", created=1, choices=[], usage=usage, served_by=ServedBy())


def counted(metrics: Metrics) -> dict[str, float]:
    lines = metrics.text().decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def test_every_look_says_all_that_was_counted_once() -> None:
    metrics = Metrics()
    for look in (1, 2, 3):
        metrics.count_whole(0.5)
        metrics.count_response(answer(prompt=5, completion=3))
        for _ in range(2):
            page = counted(metrics)
            assert page['rollplane_requests_total{outcome="ok",stream="false"}'] == look
            assert page['rollplane_request_seconds_count{stream="false"}'] == look
            assert page["rollplane_prompt_tokens_total"] == 5 * look
            assert page["rollplane_completion_tokens_total"] == 3 * look


def test_a_count_that_cannot_be_is_refused_once_and_the_next_look_says_the_others() -> None:
    metrics = Metrics()
    metrics.count_whole(0.5)
    metrics.count_response(answer(prompt=-5, completion=3))
    with pytest.raises(ValueError, match="non-negative"):
        metrics.text()
    assert counted(metrics)['rollplane_requests_total{outcome="ok",stream="false"}'] == 1
    assert counted(metrics)['rollplane_requests_total{outcome="ok",stream="false"}'] == 1
