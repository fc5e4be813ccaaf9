"""One metrics page of several processes."""

import re

from rollplane.server.crew_metrics import merged

OWN = """# HELP rollplane_requests_total Requests
# TYPE rollplane_requests_total counter
rollplane_requests_total{outcome="ok"} 3.0
# HELP rollplane_request_seconds Seconds
# TYPE rollplane_request_seconds histogram
rollplane_request_seconds_bucket{le="1.0"} 2.0
rollplane_request_seconds_bucket{le="+Inf"} 3.0
rollplane_request_seconds_count 3.0
rollplane_request_seconds_sum 4.5
# HELP rollplane_requests_in_flight Now
# TYPE rollplane_requests_in_flight gauge
rollplane_requests_in_flight 1.0
# HELP rollplane_engine_alive Alive
# TYPE rollplane_engine_alive gauge
rollplane_engine_alive 1.0
"""


def value(page: bytes, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", page.decode(), re.M)
    assert found, page.decode()
    return float(found[1])


def test_counts_add_up_and_what_speaks_of_the_fleet_is_said_once() -> None:
    other = OWN.replace('outcome="ok"', 'outcome="busy"')
    page = merged(OWN, [OWN, other], [OWN])
    assert value(page, 'rollplane_requests_total{outcome="ok"}') == 9
    assert value(page, 'rollplane_requests_total{outcome="busy"}') == 3
    assert value(page, 'rollplane_request_seconds_bucket{le="1.0"}') == 8
    assert value(page, "rollplane_request_seconds_sum") == 18
    assert value(page, "rollplane_engine_alive") == 1


def test_of_a_process_that_does_not_answer_only_counts_are_left() -> None:
    assert value(merged(OWN, [OWN], [OWN]), "rollplane_requests_in_flight") == 2


def test_a_page_alone_is_itself() -> None:
    assert merged(OWN, [], []).decode() == OWN
