"""Every route under a fuzzer that reads our own OpenAPI document: answers are what the document says, and no 5xx but a 503
that says when to come back and a 504 for the caller's own deadline.

`ROLLPLANE_FUZZ_EXAMPLES` sets the examples per route; a long run takes some hundred.
"""

import contextlib
import os
from collections.abc import AsyncIterator, Iterator

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode, Response
from schemathesis.checks import not_a_server_error
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import positive_data_acceptance
from tests.e2e.fleets import MockWorker, fleet_of
from tests.e2e.loop_thread import LoopThread

from rollplane.engines.mock.settings import MockSettings
from rollplane.server.app import route_table

EXAMPLES = int(os.environ.get("ROLLPLANE_FUZZ_EXAMPLES", "4"))
REQUEST_S = 20.0
SERVER = MockSettings(max_model_len=256)  # short: a body without max_tokens runs to the end of the context

# Not checked: that what fits the schema is accepted. A schema cannot say that an id is inside a vocabulary; and 2.0, which
# is an integer to JSON Schema, is none here.
UNCHECKED = [positive_data_acceptance, not_a_server_error]  # server errors: `allowed` has the two that are meant

pytestmark = pytest.mark.timeout(600 if "ROLLPLANE_FUZZ_EXAMPLES" in os.environ else 180)


@contextlib.asynccontextmanager
async def worker() -> AsyncIterator[str]:
    served = MockWorker(SERVER)
    await served.start()
    try:
        yield served.url
    finally:
        await served.kill()


@contextlib.asynccontextmanager
async def frontend() -> AsyncIterator[str]:
    async with fleet_of([SERVER, SERVER]) as fleet:
        yield fleet.frontend.url


ROLES = {"worker": worker, "frontend": frontend}


class Fuzzed:
    """One server of a role, and the routes that its document lists."""

    def __init__(self, role: str, thread: LoopThread) -> None:
        self.role, self.thread = role, thread
        self.url = thread.enter(ROLES[role]())
        schema = schemathesis.openapi.from_url(f"{self.url}/openapi.json")
        found = [result.ok() for result in schema.get_all_operations()]
        self.operations: dict[str, APIOperation] = {each.label: each for each in found}


@pytest.fixture(scope="module", params=ROLES)
def fuzzed(request: pytest.FixtureRequest) -> Iterator[Fuzzed]:
    with LoopThread() as thread:
        yield Fuzzed(request.param, thread)


def allowed(case: Case, response: Response) -> None:
    if response.status_code < 500:
        return
    body = case.body if isinstance(case.body, dict) else {}
    own = body.get("rollplane") if isinstance(body.get("rollplane"), dict) else body
    waited = response.status_code == 504 and isinstance(own.get("deadline_s"), int | float)
    later = response.status_code == 503 and "Retry-After" in response.headers
    assert waited or later, f"{case.as_curl_command()}\n{response.status_code} {response.text}"


def fuzz(operation: APIOperation, mode: GenerationMode, *, base_url: str) -> None:
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize="ROLLPLANE_FUZZ_EXAMPLES" not in os.environ,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def one(case: Case) -> None:
        if "wait_s" in (case.query or {}):
            case.query["wait_s"] = 0.1  # what a caller says that it waits, it waits: longer than this test does
        response = case.call(base_url=base_url, timeout=REQUEST_S)
        allowed(case, response)
        case.validate_response(response, excluded_checks=UNCHECKED)

    one()


def two_parts(path: str) -> str:
    return "/".join(path.split("/")[1:3])


ROUTES = sorted(
    {two_parts(route.path) for role in ("worker", "frontend") for route in route_table(role) if not route.doc.hidden}
)


@pytest.mark.parametrize("part", ROUTES)
def test_every_route_answers_as_its_description_says(fuzzed: Fuzzed, part: str) -> None:
    """`part`: the first two parts of the paths; each has the time limit for itself."""
    for label, operation in fuzzed.operations.items():
        if two_parts(operation.path) != part:
            continue
        requests.post(f"{fuzzed.url}/resume", timeout=REQUEST_S)  # a route fuzzed before may have paused
        fuzz(operation, GenerationMode.POSITIVE, base_url=fuzzed.url)
        if "requestBody" in operation.definition.raw or label.startswith("POST /pause"):
            fuzz(operation, GenerationMode.NEGATIVE, base_url=fuzzed.url)


def test_the_server_serves_after_all_of_it(fuzzed: Fuzzed) -> None:
    requests.post(f"{fuzzed.url}/resume", timeout=REQUEST_S)
    body = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4, "ignore_eos": True}}
    answer = requests.post(f"{fuzzed.url}/inference/v1/generate", json=body, timeout=REQUEST_S)

    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"][0]["token_ids"]) == 4
