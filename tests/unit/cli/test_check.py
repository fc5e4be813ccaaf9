"""What `check` sees before anything is started, and what `config` says of where values came from."""

import contextlib
import http.server
import importlib.metadata
import json
import os
import shutil
import socket
import struct
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rollplane.cli.check import findings
from rollplane.cli.commands import app
from rollplane.config import load_settings


def states(**flags: Any) -> dict[str, tuple[str, str]]:
    given = {name.replace("__", "."): value for name, value in flags.items()}
    found = findings(load_settings(env={}, flags={"server.port": 0, **given}))
    return {each.name: (each.state, each.says) for each in found}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"architectures": ["Tiny"]}))
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0\0\0\0")
    (path / "tokenizer.json").write_text("{}")
    return path


def test_a_whole_model_is_fine(model: Path) -> None:
    found = states(worker__engine="embedded", worker__model=str(model))

    assert [name for name, (state, _) in found.items() if state != "ok" and not name.startswith("disk")] == []
    assert found["model"][1].startswith("Tiny, 1 files")


def test_weights_that_were_cut_off_are_named(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])

    state, says = states(worker__engine="embedded", worker__model=str(model))["model"]

    assert state == "fail"
    assert "cut off" in says


def test_a_tokenizer_that_is_named_and_not_there_fails(model: Path, tmp_path: Path) -> None:
    asked = {"worker__engine": "embedded", "worker__model": str(model)}

    assert states(**asked)["text"] == ("ok", f"tokenizer in {model}")
    assert states(**asked, server__tokenizer=str(tmp_path))["text"] == ("fail", f"{tmp_path} has no tokenizer.json")


def test_files_from_the_future_are_a_warning(model: Path) -> None:
    os.utime(model / "config.json", (4e9, 4e9))

    assert states(worker__engine="embedded", worker__model=str(model))["clock"][0] == "warn"


def test_an_option_that_the_engine_lacks_fails_by_name(model: Path) -> None:
    found = states(worker__engine="embedded", worker__model=str(model), worker__engine_option=["nonsense=1"])

    assert found["engine flags"][0] == "fail"
    assert "nonsense" in found["engine flags"][1]


def test_listening_to_others_without_keys_fails() -> None:
    assert states(server__host="0.0.0.0")["keys"][0] == "fail"


def test_a_key_file_that_others_read_and_a_missing_root_are_seen(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    keys.chmod(0o644)
    absent = str(tmp_path / "absent")

    found = states(server__admin_key_file=[str(keys)], server__root=[absent])

    assert found["keys"] == ("warn", f"{keys} may be read by others (mode 644); chmod 600")
    assert found[f"root {absent}"] == ("fail", "does not exist")


def test_workers_that_nobody_answers_for_fail() -> None:
    assert states(frontend__workers=["http://127.0.0.1:1"])["worker http://127.0.0.1:1"][0] == "fail"


@pytest.mark.parametrize(
    ("settings", "name", "says"),
    [
        ({"workers_file": "absent.json"}, "workers file", "there is no worker file absent.json"),
        ({"fleet": {"teacher": "nonsense"}}, "fleet teacher", "nonsense"),
        ({"fleet": {"teacher": "http://127.0.0.1:1"}}, "worker http://127.0.0.1:1", "cannot be reached"),
        ({"fleet": {"teacher": "http://127.0.0.1:1"}}, "workers", "a frontend needs its workers"),
        ({"dynamo_rl_url": "http://127.0.0.1:1"}, "dynamo http://127.0.0.1:1", "cannot be reached"),
        ({"workers": ["http://127.0.0.1:1"], "router": "soup"}, "router", "router policy 'soup' is unknown"),
        ({"workers": ["http://127.0.0.1:1"], "worker_key_file": "absent"}, "worker key", "absent cannot be read"),
    ],
)
def test_what_a_frontend_could_not_start_with_fails(settings: dict[str, object], name: str, says: str) -> None:
    found = states(**{f"frontend__{field}": value for field, value in settings.items()})

    assert found["role"] == ("ok", "frontend")
    assert found[name][0] == "fail"
    assert says in found[name][1]


def test_an_engine_that_is_not_installed_fails_among_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = states(worker__engine="vllm")

    assert found["engine"][0] == "fail"
    assert "pip install 'rollplane[vllm]'" in found["engine"][1]
    assert "ports" in found


@pytest.mark.parametrize("engine", ["embedded", "vllm"])
def test_the_flag_that_an_engine_needs_is_named(engine: str) -> None:
    assert states(worker__engine=engine)["engine flags"] == (
        "fail",
        f"the {engine} engine needs worker.model (--model)",
    )


def test_a_ready_file_that_could_not_be_written_fails(tmp_path: Path) -> None:
    file = str(tmp_path / "absent" / "ready")

    state, says = states(server__ready_file=file)["ready file"]

    assert state == "fail"
    assert "is not a directory" in says


def test_a_port_that_somebody_listens_at_fails() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        state, says = states(server__port=taken.getsockname()[1])["ports"]

    assert state == "fail"
    assert "in use" in says


@contextlib.contextmanager
def worker_that_says(date: str) -> Iterator[str]:
    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response_only(200)
            self.send_header("Date", date)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Health) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_a_worker_whose_clock_is_another_is_a_warning() -> None:
    for ahead_s, expected in ((0, "ok"), (600, "warn")):
        with worker_that_says(formatdate(time.time() + ahead_s, usegmt=True)) as url:
            state, says = states(frontend__workers=[url])[f"worker {url}"]
        assert state == expected, says
    assert "clock" in says


def test_a_disk_that_is_almost_full_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=2**20))

    assert states(server__root=[str(tmp_path)])[f"disk {tmp_path}"][0] == "warn"


def test_a_vllm_that_is_too_old_fails(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.28.1")

    state, says = states(worker__engine="vllm", worker__model=str(model))["engine"]

    assert state == "fail"
    assert "0.28.1 is older than 0.29" in says


def test_the_command_says_how_many_failed_and_ends_with_1() -> None:
    done = CliRunner().invoke(app, ["check", "--engine", "embedded", "--model", "/no/such", "--port", "0"])

    assert done.exit_code == 1
    assert "1 failed" in done.output


def test_config_says_where_each_value_came_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "rollplane.toml"
    file.write_text("[server]\ndrain_s = 3.0\n")
    monkeypatch.setenv("ROLLPLANE_SERVER_STALL_S", "7")

    lines = CliRunner().invoke(app, ["config", "--config", str(file), "--port", "1234"]).output.splitlines()

    assert f"server.drain_s = 3.0  # file {file}" in lines
    assert "server.stall_s = 7.0  # env ROLLPLANE_SERVER_STALL_S" in lines
    assert "server.port = 1234  # flag --port" in lines
    assert "server.host = '127.0.0.1'  # default" in lines
