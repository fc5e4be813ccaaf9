"""The command line as processes: ready lines, refusals, restarts, and nothing left behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.commands import COMMAND, START_S, ready_line, running

import rollplane


def run(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
        env={**os.environ, **(env or {})},
    )


def ask(url: str, path: str = "/inference/v1/generate", body: Any = None) -> tuple[int, Any]:
    data = json.dumps(body if body is not None else {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2}})
    request = urllib.request.Request(url + path, data=data.encode(), headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def descendants(pid: int) -> set[int]:
    found: set[int] = set()
    todo = [pid]
    while todo:
        parent = todo.pop()
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                children = [int(child) for child in task.read_text().split()]
                found.update(children)
                todo.extend(children)
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def all_gone(pids: set[int], *, seconds: float) -> set[int]:
    """Those that are still there after at most so many seconds."""
    ends = time.monotonic() + seconds
    while (left := {pid for pid in pids if alive(pid)}) and time.monotonic() < ends:
        time.sleep(0.05)
    return left


def test_the_version_is_the_packages() -> None:
    assert run("version").stdout.strip() == rollplane.__version__


def test_a_worker_says_ready_serves_and_stops_on_sigterm(tmp_path: Path) -> None:
    ready_file = tmp_path / "ready.json"
    with running(
        *("worker", "--engine", "mock", "--port", "0", "--ready-file", str(ready_file)), log=tmp_path / "log"
    ) as worker:
        ready = ready_line(worker, tmp_path / "log")
        assert json.loads(ready_file.read_text()) == ready
        status, answer = ask(ready["url"])
        assert (status, len(answer["choices"][0]["token_ids"])) == (200, 2)
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(20) == 0
    assert "stopped" in (tmp_path / "log").read_text()


def test_a_running_request_may_finish_while_a_worker_drains(tmp_path: Path) -> None:
    with running(
        *("worker", "--port", "0", "--drain-s", "20", "--engine-option", "step_s=0.02"), log=tmp_path / "log"
    ) as worker:
        url = ready_line(worker, tmp_path / "log")["url"]

        status, answer = terminate_while_running(worker, url, max_tokens=200)
        assert worker.wait(30) == 0
    assert (status, len(answer["choices"][0]["token_ids"])) == (200, 200)


def test_while_a_worker_drains_probes_and_new_requests_are_told_so(tmp_path: Path) -> None:
    with running(
        *("worker", "--port", "0", "--drain-s", "20", "--engine-option", "step_s=0.02"), log=tmp_path / "log"
    ) as worker:
        url = ready_line(worker, tmp_path / "log")["url"]
        body = {"token_ids": [1], "sampling_params": {"max_tokens": 250, "ignore_eos": True}}
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(ask, url, body=body)
            while "rollplane_requests_in_flight 1.0" not in _metrics(url):
                assert not asked.done()
            worker.send_signal(signal.SIGTERM)
            while '"draining"' not in _health(url):
                assert not asked.done()
            status, answer = ask(url)
            assert (status, answer["error"]["code"], answer["error"]["retry_after_s"]) == (503, "unavailable", 1.0)
            assert not asked.done()
            assert asked.result(30)[0] == 200
        assert worker.wait(30) == 0


def _health(url: str) -> str:
    with urllib.request.urlopen(f"{url}/health", timeout=20) as answer:
        return str(answer.read().decode())


def terminate_while_running(process: subprocess.Popen[str], url: str, *, max_tokens: int) -> tuple[int, Any]:
    """What a request gets during which the process is asked to stop."""
    body = {"token_ids": [1], "sampling_params": {"max_tokens": max_tokens, "ignore_eos": True}}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, url, body=body)
        while "rollplane_requests_in_flight 1.0" not in _metrics(url):
            assert not asked.done()
        process.send_signal(signal.SIGTERM)
        return asked.result(30)


def _metrics(url: str) -> str:
    with urllib.request.urlopen(f"{url}/metrics", timeout=20) as answer:
        return str(answer.read().decode())


def test_a_request_that_outlasts_the_drain_gets_an_error_of_ours(tmp_path: Path) -> None:
    with running(
        *("worker", "--port", "0", "--drain-s", "0.2", "--engine-option", "step_s=0.05"), log=tmp_path / "log"
    ) as worker:
        url = ready_line(worker, tmp_path / "log")["url"]

        status, answer = terminate_while_running(worker, url, max_tokens=4000)
        assert worker.wait(30) == 0
    assert status == 503
    assert answer["error"]["code"] in ("engine_died", "unavailable")


def test_a_worker_stops_when_its_parent_is_gone(tmp_path: Path) -> None:
    with running("worker", "--port", "0", "--stop-with-stdin", log=tmp_path / "log") as worker:
        ready_line(worker, tmp_path / "log")
        assert worker.stdin is not None
        worker.stdin.close()
        assert worker.wait(20) == 0


@pytest.mark.parametrize("command", [("worker",), ("frontend", "--workers", "http://127.0.0.1:1"), ("serve",)])
def test_without_keys_nothing_listens_beyond_loopback(command: tuple[str, ...]) -> None:
    done = run(*command, "--host", "0.0.0.0")

    assert done.returncode == 2
    assert "listens on loopback only" in done.stderr
    assert "admin_key_file" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "env", "says"),
    [
        (("--port", "http"), {}, "server.port (from --port): expected `int`, got 'http'"),
        (("--port", ""), {}, "server.port (from --port): expected `int`, got ''"),
        (("--engine", "embedded"), {}, "the embedded engine needs worker.model (--model)"),
        (("--port", "0", "--ready-file", "/nonexistent/ready"), {}, "ready file /nonexistent/ready cannot be written"),
        (("--port", "70000"), {}, "server.port (from --port)"),
        ((), {"ROLLPLANE_SERVER_PORT": "x"}, "server.port (from ROLLPLANE_SERVER_PORT)"),
        ((), {"ROLLPLANE_SERVER_PROT": "1"}, "ROLLPLANE_SERVER_PROT names no option"),
        (("--engine", "warp"), {}, "engine 'warp' is unknown"),
        (("--engine-option", "speed=1"), {}, "worker.engine_option.speed"),
        (("--engine-option", "max_num_seqs=x"), {}, "worker.engine_option.max_num_seqs"),
        (("--admin-key-file", "/nonexistent"), {}, "key file /nonexistent cannot be read"),
        (("--config", "/nonexistent.toml"), {}, "config file /nonexistent.toml cannot be read"),
    ],
)
def test_wrong_settings_are_one_sentence_with_their_origin(
    arguments: tuple[str, ...], env: dict[str, str], says: str
) -> None:
    done = run("worker", *arguments, env=env)

    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_said(tmp_path: Path) -> None:
    with running("worker", "--port", "0", log=tmp_path / "log") as worker:
        port = ready_line(worker, tmp_path / "log")["url"].rsplit(":", 1)[1]
        for command in ("worker", "serve", "mock-vllm"):
            done = run(command, "--port", port)
            assert done.returncode == 2
            assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
            assert "Traceback" not in done.stderr


def test_a_routing_policy_that_is_none_is_one_sentence() -> None:
    done = run("frontend", "--workers", "http://127.0.0.1:1", "--router", "soup", "--port", "0")

    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "rollplane: router policy 'soup' is unknown; known: least_loaded, prefix_aware, round_robin"
    ]


def test_a_root_that_is_not_there_is_said_at_the_start(tmp_path: Path) -> None:
    with running("worker", "--root", str(tmp_path / "absent"), "--port", "0", log=tmp_path / "log") as worker:
        ready_line(worker, tmp_path / "log")
        assert f"root_missing                   root={tmp_path / 'absent'}" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nonsense",), "URL[0] must be http(s)://host[:port], got 'nonsense'"),
        (("--key-file", "/dev/null"), "no key in /dev/null"),
    ],
)
def test_status_says_what_is_wrong_with_its_arguments(arguments: tuple[str, ...], says: str) -> None:
    done = run("status", *arguments, "--once")

    assert done.returncode == 2
    assert says in done.stderr


def test_settings_are_shown_with_their_origin(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text('[server]\nport = 1234\n[worker]\nengine = "mock"\n')
    done = run(
        *("worker", "--config", str(config), "--max-num-seqs", "7", "--show-config"),
        env={"ROLLPLANE_SERVER_HOST": "localhost"},
    )

    assert f"server.port = 1234  # file {config}" in done.stdout
    assert "server.host = 'localhost'  # env ROLLPLANE_SERVER_HOST" in done.stdout
    assert "worker.max_num_seqs = 7  # flag --max-num-seqs" in done.stdout
    assert "server.drain_s = 20.0  # default" in done.stdout


def test_a_missing_extra_is_a_sentence() -> None:
    code = (
        "import sys; sys.modules['typer'] = None; sys.argv = ['rollplane', 'version'];"
        "from rollplane.cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)

    assert done.returncode == 2
    assert "pip install 'rollplane[server]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_serve_makes_a_fleet_restarts_a_killed_worker_and_leaves_nothing_behind(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with running("serve", "--workers", "2", "--port", "0", "--backoff-s", "0.05", log=log) as serve:
        ready = ready_line(serve, log)
        url = ready["url"]
        assert len(ready["workers"]) == 2
        assert ask(url)[0] == 200
        before = descendants(serve.pid)
        assert len(before) == 3
        victim = next(pid for pid in before if b"worker-0.json" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(victim, signal.SIGKILL)
        for _ in range(20):
            assert ask(url)[0] == 200  # the other worker answers meanwhile
        ends = time.monotonic() + START_S
        while log.read_text().count("child=worker-0 url=") < 2 and time.monotonic() < ends:
            time.sleep(0.05)
        started = descendants(serve.pid)
        assert len(started - {victim}) == 3
        assert victim not in started
        serve.send_signal(signal.SIGTERM)
        assert serve.wait(30) == 0
        assert all_gone(before | started, seconds=10.0) == set()


def test_serve_keeps_its_policy_when_the_frontend_is_killed(tmp_path: Path) -> None:
    """The frontend owns the fleet's version; the next one must not serve workers that are behind."""
    weights = tmp_path / "step_1"
    weights.mkdir()
    (weights / "mock_weights.json").write_text('{"content": "one"}')
    log = tmp_path / "log"
    with running("serve", "--workers", "2", "--port", "0", "--backoff-s", "0.05", log=log) as serve:
        url = ready_line(serve, log)["url"]
        assert ask(url, "/update_weights", {"weight_dir": str(weights)})[0] == 200
        for name in (b"frontend.json", b"worker-1.json"):
            victim = next(p for p in descendants(serve.pid) if name in Path(f"/proc/{p}/cmdline").read_bytes())
            before = log.read_text().count("child_ready")
            os.kill(victim, signal.SIGKILL)
            ends = time.monotonic() + START_S
            while log.read_text().count("child_ready") == before and time.monotonic() < ends:
                time.sleep(0.05)
        for _ in range(10):
            status, answer = ask(url)
            assert (status, answer["choices"][0]["policy_versions"]) == (200, [["step_1", 0]])


def test_a_worker_whose_engine_died_ends_so_that_another_may_start(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with running("worker", "--port", "0", "--engine-option", 'faults=[{"kind":"die"}]', log=log) as worker:
        url = ready_line(worker, log)["url"]
        status, answer = ask(url)
        assert (status, answer["error"]["code"]) == (503, "engine_died")
        assert worker.wait(20) == 1
    assert "the engine died" in log.read_text()


def test_children_of_a_killed_supervisor_stop_by_themselves(tmp_path: Path) -> None:
    with running("serve", "--workers", "2", "--port", "0", "--drain-s", "1", log=tmp_path / "log") as serve:
        ready_line(serve, tmp_path / "log")
        children = descendants(serve.pid)
        assert len(children) == 3
        serve.kill()
        serve.wait(10)
        left = all_gone(children, seconds=20.0)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert left == set()


def test_serve_gives_up_on_workers_that_cannot_start(tmp_path: Path) -> None:
    done = run("serve", "--workers", "1", "--port", "0", "--engine-option", "max_model_len=0")

    assert done.returncode == 2
    assert "worker-0 ended with code 2" in done.stderr
    assert "max_model_len" in done.stderr


def test_the_workers_of_serve_answer_to_their_frontend_only(tmp_path: Path) -> None:
    with running("serve", "--workers", "1", "--port", "0", log=tmp_path / "log") as serve:
        ready = ready_line(serve, tmp_path / "log")
        assert ask(ready["workers"][0])[0] == 401
        assert ask(ready["url"], "/engine/pause_generation", {})[0] == 200


def test_a_frontend_needs_its_workers() -> None:
    done = run("frontend")

    assert done.returncode == 2
    assert "frontend.workers" in done.stderr
