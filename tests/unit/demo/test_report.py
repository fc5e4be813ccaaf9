"""Facts about the report of a run."""

import io
import json
import re

import pytest
from rich.console import Console

from rollplane.demo.report import print_report, write_report

KL = {"none": 8e-4, "routes": 7.5e-4, "mask": 3e-5, "both": 8e-6}


@pytest.fixture
def report():
    step = {"seconds": 0.5, "tokens": 896, "rollout_seconds": 0.25, "kl": 1e-5}
    return {
        "options": {"seed": 0, "workers": 2, "engine_dtype": "bfloat16", "steps": 3, "out": "<out>"},
        "reward_before": 0.36,
        "reward_after": 0.98,
        "mismatch_kl": KL,
        "stress_mismatch_kl": KL,
        "previous_policy": {"ratio": 213.6},
        "policy_versions": ["v0", "v1", "v2"],
        "requests": 48,
        "lost_requests": 0,
        "seconds": 61.0,
        "steps": [
            {**step, "step": 0, "reward": 0.4, "policy_versions": ["v0"], "mismatch_kl": KL},
            {**step, "step": 1, "reward": 0.5, "policy_versions": ["v1"]},
            {
                **step,
                "step": 2,
                "reward": 0.6,
                "policy_versions": ["v1", "v2"],
                "kl": None,
                "in_flight": {
                    "mixed_answers": 5,
                    "versions": {
                        "v1": {"tokens": 300, "kl": 2e-6, "kl_after_boundary": None},
                        "v2": {"tokens": 596, "kl": None, "kl_after_boundary": 1e-4},
                    },
                },
            },
        ],
        "checks": {"no_request_lost": True, "stress_gain_at_least_20": False},
    }


def test_the_json_is_the_report(report, tmp_path):
    write_report(report, tmp_path)
    assert json.loads((tmp_path / "report.json").read_text()) == report


def test_the_page_needs_nothing_else(report, tmp_path):
    write_report(report, tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 3
    assert not re.search(r"<(script|link|img)\b", page)
    assert not re.search(r"""(?:src|href)=["'](?!#)""", page.replace('xlink:href="#', "")), "loads nothing"
    for shown in ("0.360, 0.980", "8.0e-06", "BROKEN", "no request lost", "214x"):
        assert shown in page


def test_the_tables_show_every_setting_and_in_flight_version(report):
    console = Console(width=140, record=True, file=io.StringIO())
    print_report(report, console)
    text = console.export_text()
    for shown in ("nothing", "sampling masks", "routes and masks", "v1 v2", "Updates in flight", "1.0e-04"):
        assert shown in text
