"""The commands of the tutorial and the plain script's page, run as they stand there (but for the port)."""

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.commands import ready_line, running
from tests.e2e.test_readme import free_port

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str, language: str, *, port: str) -> list[str]:
    text = (DOCS / page).read_text().replace("\\\n", " ").replace("8000", port)
    return [block.strip() for block in re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)]


def shell(command: str) -> Any:
    done = subprocess.run(["bash", "-ec", command], capture_output=True, timeout=60, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.timeout(300)
def test_the_tutorial_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, start, rollout, mistake, update, _ = blocks("tutorial.md", "bash", port=str(free_port()))
    prepare, serve = start.split("\n", 1)
    subprocess.run(["bash", "-ec", prepare], check=True, timeout=30)
    with running(*shlex.split(serve)[1:], log=tmp_path / "serve.log") as process:
        ready_line(process, tmp_path / "serve.log")
        before = shell(rollout)["choices"][0]
        refused = shell(mistake)["error"]
        updated = shell(update)
        after = shell(rollout)["choices"][0]
        old = '"sampling_params": {"max_tokens"'
        asked_back = rollout.replace(old, '"rollplane": {"policy_version": "initial"}, ' + old)
        gone = shell(asked_back)["error"]

    assert len(before["logprobs"]["content"]) == len(before["sampling_mask"]) == len(before["token_ids"]) == 4
    assert before["routed_experts"]["shape"] == [6, 2, 2]
    assert before["policy_versions"] == [["initial", 0]]
    assert refused["param"] == "token_ids[1]"
    assert (updated["policy_version"], updated["applied"]) == ("v1", True)
    assert after["policy_versions"] == [["v1", 0]]
    assert after["token_ids"] != before["token_ids"]
    assert "v1" in gone["message"]


@pytest.mark.timeout(300)
def test_the_plain_script_learns_and_agrees_with_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    port = str(free_port())
    make, loop = blocks("frameworks/plain.md", "python", port=port)
    (serve,) = blocks("frameworks/plain.md", "bash", port=port)
    # In this process, which may have torch already: two starts less.
    exec(compile(make, "plain.md, the policy", "exec"), {"__name__": "__main__"})
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with running(*shlex.split(serve)[1:], log=tmp_path / "serve.log", env=quiet) as process:
        ready_line(process, tmp_path / "serve.log")
        capsys.readouterr()
        exec(compile(loop, "plain.md, the loop", "exec"), {"__name__": "__main__"})
        printed = capsys.readouterr().out

    steps = re.findall(r"step (\d): reward ([\d.]+), mismatch KL (\S+), sampled by \['(v\d)'\]", printed)
    assert [(step, version) for step, _, _, version in steps] == [("1", "v0"), ("2", "v1"), ("3", "v2")]
    assert all(abs(float(kl)) < 1e-9 for _, _, kl, _ in steps)
    assert float(steps[2][1]) > float(steps[0][1])
