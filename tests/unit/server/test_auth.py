"""Keys, scopes and bindings."""

from pathlib import Path

import pytest

from rollplane.errors import InvalidRequest
from rollplane.server.app import route_table
from rollplane.server.auth import KeyRing, check_binding, is_loopback, required_access


def test_a_ring_without_files_is_open() -> None:
    assert repr(KeyRing()) == "<KeyRing open>"


def test_an_admin_key_wins_over_the_same_data_key(tmp_path: Path) -> None:
    (tmp_path / "d").write_text("both\nonly-data\n")
    (tmp_path / "a").write_text("# comment\n\nboth\n")
    ring = KeyRing([tmp_path / "d"], [tmp_path / "a"])

    assert [ring.scope_of(key) for key in ("both", "only-data", "", "other")] == ["admin", "data", None, None]
    assert repr(ring) == "<KeyRing 2 data keys, 1 admin keys>"


def test_a_ring_whose_files_hold_no_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("# nothing\n")

    with pytest.raises(InvalidRequest, match="no key in"):
        KeyRing([], [tmp_path / "a"])


def test_a_file_that_disappears_takes_its_keys_and_never_opens_the_server(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_text("key\n")
    ring = KeyRing([], [file], reload_s=0.0)
    file.unlink()

    assert ring.scope_of("key") is None
    assert not ring.open
    file.write_text("key\n")
    assert ring.scope_of("key") == "admin"


def test_files_are_looked_at_no_more_often_than_asked(tmp_path: Path) -> None:
    file, now = tmp_path / "a", [0.0]
    file.write_text("old\n")
    ring = KeyRing([], [file], reload_s=1.0, clock=lambda: now[0])
    file.write_text("newer\n")

    assert ring.scope_of("newer") is None
    now[0] = 1.0
    assert ring.scope_of("newer") == "admin"


@pytest.mark.parametrize("line", ["two words", "caf\u00e9", "tab\tkey"])
def test_a_line_that_is_no_key_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "a").write_text(line)

    with pytest.raises(InvalidRequest, match="line 1"):
        KeyRing([], [tmp_path / "a"])


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.attacker.example", False),
        ("", False),
    ],
)
def test_loopback_is_told_from_the_rest(tmp_path: Path, host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
    (tmp_path / "a").write_text("key")
    check_binding(host, KeyRing([], [tmp_path / "a"]))
    if loopback:
        check_binding(host, KeyRing())
    else:
        with pytest.raises(InvalidRequest, match="without keys"):
            check_binding(host, KeyRing())


@pytest.mark.parametrize(
    ("path", "access"),
    [
        ("/health", "open"),
        ("/inference/v1/generate", "data"),
        ("/v1/models/org/name", "data"),
        ("/pause", "admin"),
        ("/v1/load_lora_adapter", "admin"),
        ("/internal/v1/generate", "admin"),
        ("/health/", "data"),
        ("/nowhere", "data"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "TRACE"])
def test_access_is_the_serving_routes_whatever_the_method(path: str, access: str, method: str) -> None:
    scope = {"type": "http", "method": method, "path": path, "root_path": "", "headers": []}

    assert required_access(scope, route_table("worker")) == access
