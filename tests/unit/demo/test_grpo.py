"""Facts about the demo's loop, with a scripted client in place of a fleet."""

import random

import numpy as np
import pytest

from rollplane.demo import grpo
from rollplane.errors import Unavailable
from rollplane.protocol.artifacts import RoutedExperts, SamplingMask, TokenLogprobs
from rollplane.protocol.response import Choice, GenerateResponse, Usage

TOKENS = grpo.DIGITS + 1


def answer(index, token_ids, versions=(("v4", 0),), finish_reason="stop"):
    tokens = np.array(token_ids, np.int32)
    rows = grpo.DIGITS + 2 + len(tokens) - 1
    return Choice(
        index=index,
        token_ids=tokens,
        finish_reason=finish_reason,
        logprobs=TokenLogprobs(values=np.full(len(tokens), -0.5, np.float32)),
        routed_experts=RoutedExperts(array=np.tile(np.array([3, 1], np.uint8), (rows, 4, 1))),
        sampling_mask=SamplingMask(ids=tokens, offsets=np.arange(len(tokens) + 1, dtype=np.int32)),
        policy_versions=list(versions),
    )


class ScriptedClient:
    """Answers each request by a function of its prompt; keeps what it was asked."""

    def __init__(self, respond):
        self.respond = respond
        self.asked = []

    async def generate(self, token_ids, **options):
        self.asked.append((token_ids, options))
        choices = self.respond(token_ids)
        usage = Usage(prompt_tokens=len(token_ids), completion_tokens=sum(len(one.token_ids) for one in choices))
        return GenerateResponse(request_id="r", model="m", created=0, choices=choices, usage=usage)


def right(prompt, **options):
    return [answer(index, [*reversed(prompt[1:-1]), grpo.EOS], **options) for index in range(grpo.GROUP)]


async def roll_out(client, *, allowed=("v4",), problems=2, progress=None, meanwhile=None):
    rng = random.Random(0)
    return await grpo.roll_out(
        client,
        [grpo.make_problem(rng) for _ in range(problems)],
        name="step 4",
        seed=100,
        allowed=list(allowed),
        progress=progress or grpo.Progress(),
        meanwhile=meanwhile,
    )


def test_the_answer_is_the_prompt_reversed():
    prompt, expected = grpo.make_problem(random.Random(1))
    assert (prompt[0], prompt[-1], expected[-1]) == (grpo.BOS, grpo.SEPARATOR, grpo.EOS)
    assert expected[:-1] == prompt[-2:0:-1]


def test_the_demonstrator_is_right_about_a_third_of_the_time():
    rng = random.Random(0)
    answers = [grpo.make_problem(rng)[1] for _ in range(4000)]
    share = sum(grpo.demonstrate(one, rng) == one for one in answers) / len(answers)
    assert share == pytest.approx((1 - grpo.NOISE) ** grpo.DIGITS, abs=0.03)


async def test_right_answers_are_rewarded_and_wrong_ones_are_not():
    def respond(prompt):
        return [*right(prompt)[:-1], answer(grpo.GROUP - 1, [4] * TOKENS, finish_reason="length")]

    client, progress = ScriptedClient(respond), grpo.Progress()
    rollouts = await roll_out(client, progress=progress)
    assert rollouts.rewards.tolist() == ([1.0] * (grpo.GROUP - 1) + [0.0]) * 2
    assert (progress.requests, progress.answered, progress.policy_versions) == (2, 2, {"v4"})


async def test_a_rollout_asks_for_everything_that_replay_needs():
    client = ScriptedClient(right)
    await roll_out(client, allowed=["v4"])
    options = [options for _, options in client.asked]
    assert all(one["routed_experts"] and one["sampling_mask"] for one in options)
    assert {one["min_policy_version"] for one in options} == {"v4"}
    assert {one["sampling_params"]["n"] for one in options} == {grpo.GROUP}
    seeds = [one["sampling_params"]["seed"] for one in options]
    assert max(seeds) - min(seeds) >= grpo.GROUP, "child seeds of two groups must not meet"
    assert len({one["request_id"] for one in options}) == 2


async def test_a_lost_request_names_its_step():
    def respond(prompt):
        raise Unavailable("no worker")

    progress = grpo.Progress()
    with pytest.raises(grpo.StepFailed, match=r"step 4: 2 of 2 requests were lost; .*no worker"):
        await roll_out(ScriptedClient(respond), progress=progress)
    assert (progress.requests, progress.answered) == (2, 0)


async def test_a_missing_answer_names_its_step():
    with pytest.raises(grpo.StepFailed, match=r"step 4: .*came back with 7 of 8 answers"):
        await roll_out(ScriptedClient(lambda prompt: right(prompt)[:-1]))


async def test_an_aborted_answer_names_its_step():
    with pytest.raises(grpo.StepFailed, match="step 4: answer 0 ended by 'abort'"):
        await roll_out(ScriptedClient(lambda prompt: right(prompt, finish_reason="abort")))


async def test_an_answer_of_another_policy_names_its_step():
    with pytest.raises(grpo.StepFailed, match=r"step 4: answer 0 was made by \['v3'\]; allowed: \['v4'\]"):
        await roll_out(ScriptedClient(lambda prompt: right(prompt, versions=[("v3", 0)])))


async def test_broken_routes_name_their_step():
    def respond(prompt):
        choices = right(prompt)
        choices[3].routed_experts = RoutedExperts(array=np.zeros_like(choices[3].routed_experts.array))
        return choices

    with pytest.raises(grpo.StepFailed, match="step 4: routes: all 112 routed expert ids are zero"):
        await roll_out(ScriptedClient(respond))


async def test_mixed_answers_say_which_token_is_whose():
    rollouts = await roll_out(
        ScriptedClient(lambda prompt: right(prompt, versions=[("v3", 0), ("v4", 2)])), allowed=["v3", "v4"], problems=1
    )
    assert rollouts.version_of_token.tolist() == (["v3"] * 2 + ["v4"] * (TOKENS - 2)) * grpo.GROUP


@pytest.mark.parametrize("spans", [[("v3", 0)], [("v4", 0)], [("v3", 0), ("v4", 1)]])
def test_versions_in_flight_are_old_new_or_old_then_new(spans):
    grpo.check_versions(spans, allowed=["v3", "v4"], name="step 4")


@pytest.mark.parametrize(
    ("spans", "says"),
    [
        ([("v4", 0), ("v3", 1)], r"made by \['v4', 'v3'\]"),
        ([("v5", 0)], r"made by \['v5'\]"),
        ([], r"made by \[\]"),
        ([("v3", 0), ("v4", None)], "without saying where"),
    ],
)
def test_other_versions_in_flight_are_refused(spans, says):
    with pytest.raises(grpo.StepFailed, match=says):
        grpo.check_versions(spans, allowed=["v3", "v4"], name="step 4")


async def test_an_update_runs_while_requests_are_in_flight():
    seen = []

    async def meanwhile():
        seen.append("update")

    def respond(prompt):
        seen.append("request")
        return right(prompt)

    await roll_out(ScriptedClient(respond), meanwhile=meanwhile)
    assert sorted(seen) == ["request", "request", "update"]


def test_advantages_compare_within_a_group():
    rewards = np.zeros(2 * grpo.GROUP, np.float32)
    rewards[: grpo.GROUP // 2] = 1
    found = grpo.advantages(rewards)
    assert found[: grpo.GROUP // 2].min() > 0.9
    assert found[grpo.GROUP // 2 : grpo.GROUP].max() < -0.9
    assert not found[grpo.GROUP :].any(), "a group of equals teaches nothing"
