"""What vLLM is started with, and what it may not be started with."""

from types import SimpleNamespace
from typing import Any

import pytest

from rollplane.engines.vllm.settings import (
    WORKER_EXTENSION,
    VllmSettings,
    check_engine_args,
    engine_words,
    needs_v2_runner,
)
from rollplane.errors import InvalidRequest

FIELDS = frozenset({"scheduling_policy", "logprobs_mode", "mm_device_do_normalize"})


def words(*engine_args: str, fields: frozenset[str] = FIELDS, on_cpu: bool = False) -> list[str]:
    return engine_words(VllmSettings(model="m", engine_args=engine_args), fields, kv_events_at="/run", on_cpu=on_cpu)


def test_the_callers_words_come_last_so_that_they_win() -> None:
    found = words("--scheduling-policy", "fcfs")
    assert found.index("priority") < found.index("fcfs")
    assert found[-2:] == ["--scheduling-policy", "fcfs"]


def test_a_default_that_a_release_does_not_know_is_left_out() -> None:
    assert "--no-mm-device-do-normalize" in words()
    assert "--no-mm-device-do-normalize" not in words(fields=FIELDS - {"mm_device_do_normalize"})


def test_vllm_labels_its_metrics_by_the_names_that_are_served() -> None:
    settings = VllmSettings(model="m", served_model_name=("policy", "alias"))
    found = engine_words(settings, FIELDS, kv_events_at="/run")
    at = found.index("--served-model-name")
    assert found[at + 1 : at + 3] == ["policy", "alias"]
    assert "--served-model-name" not in words()


def test_prompts_are_not_computed_in_parts_on_a_cpu() -> None:
    assert "--no-enable-chunked-prefill" in words(on_cpu=True)
    assert "--no-enable-chunked-prefill" not in words()


def args(**changes: Any) -> Any:
    given = {
        "worker_extension_cls": WORKER_EXTENSION,
        "data_parallel_size": 1,
        "logprobs_mode": "processed_logprobs",
        "return_sampling_mask": False,
        "enable_return_routed_experts": False,
    }
    return SimpleNamespace(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"worker_extension_cls": "other.Extension"}, "worker-extension-cls"),
        ({"data_parallel_size": 2}, "data-parallel-size"),
        ({"logprobs_mode": "raw_logits"}, "logprobs-mode"),
        ({"logprobs_mode": "raw_logprobs", "return_sampling_mask": True}, "return-sampling-mask"),
    ],
)
def test_arguments_that_break_promises_are_refused_by_name(changes: dict[str, Any], flag: str) -> None:
    check_engine_args(args())
    with pytest.raises(InvalidRequest, match=f"--{flag}"):
        check_engine_args(args(**changes))


@pytest.mark.parametrize(
    ("line", "changes", "flag"),
    [
        ("0.31", {}, None),
        ("0.31", {"enable_return_routed_experts": True}, "--enable-return-routed-experts"),
        ("0.31", {"return_sampling_mask": True}, "--return-sampling-mask"),
        ("0.29", {"enable_return_routed_experts": True}, None),
        ("0.29", {"return_sampling_mask": True}, "--return-sampling-mask"),
    ],
)
def test_what_needs_model_runner_v2_depends_on_the_release(line: str, changes: dict[str, Any], flag: str) -> None:
    assert needs_v2_runner(args(**changes), line=line) == flag
