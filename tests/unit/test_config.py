"""Settings: one declaration, every source, the origin of every value."""

from pathlib import Path

import pytest

from rollplane.config import (
    TABLES,
    FrontendSettings,
    ServerSettings,
    WorkerSettings,
    load_settings,
    options,
    read_keys,
)
from rollplane.errors import InvalidRequest


def test_the_defaults_fit_their_own_records() -> None:
    settings = load_settings(env={})

    for record in TABLES.values():
        assert settings.table(record) == record()


def test_flags_win_over_variables_and_variables_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[server]\nport = 1\nhost = 'a'\ndrain_s = 1.5\n")
    settings = load_settings(
        file=file,
        env={"ROLLPLANE_SERVER_PORT": "2", "ROLLPLANE_SERVER_HOST": "b"},
        flags={"server.port": "3", "server.host": None},
    )

    server = settings.table(ServerSettings)
    assert (server.port, server.host, server.drain_s) == (3, "b", 1.5)
    assert settings.origin("server.port") == "flag --port"
    assert settings.origin("server.host") == "env ROLLPLANE_SERVER_HOST"
    assert settings.origin("server.drain_s") == f"file {file}"
    assert settings.origin("server.log_level") == "default"


def test_every_option_has_a_sentence_and_names_of_its_own() -> None:
    found = [option for table in TABLES for option in options(table)]

    assert all(option.help for option in found)
    assert len({option.env for option in found}) == len(found)


def test_lists_and_maps_are_read_from_text() -> None:
    settings = load_settings(
        env={"ROLLPLANE_WORKER_ENGINE_OPTION": "a=1, b=2", "ROLLPLANE_FRONTEND_WORKERS": "http://a,http://b"},
    )

    assert settings.table(WorkerSettings).engine_option == {"a": "1", "b": "2"}
    assert settings.table(FrontendSettings).workers == ["http://a", "http://b"]


def test_a_repeated_flag_may_hold_json_with_commas() -> None:
    settings = load_settings(env={}, flags={"worker.engine_option": ['moe={"layers":2,"top_k":1}', "x=y"]})

    assert settings.table(WorkerSettings).engine_option == {"moe": '{"layers":2,"top_k":1}', "x": "y"}


@pytest.mark.parametrize(("text", "value"), [("true", True), ("1", True), ("false", False), ("0", False)])
def test_switches_are_read_from_text(text: str, value: bool) -> None:
    settings = load_settings(env={"ROLLPLANE_WORKER_ISOLATE_BY_VERSION": text})

    assert settings.table(WorkerSettings).isolate_by_version is value


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"ROLLPLANE_SERVER_PORT": "x"}, r"server\.port \(from ROLLPLANE_SERVER_PORT\)"),
        ({"ROLLPLANE_SERVER_PORT": "65536"}, "<= 65535"),
        ({"ROLLPLANE_SERVER_STALL_S": "0"}, "server.stall_s"),
        ({"ROLLPLANE_SERVER_ROUTES_ENCODING": "zip"}, "server.routes_encoding"),
        ({"ROLLPLANE_SERVER_NOPE": "1"}, "ROLLPLANE_SERVER_NOPE names no option"),
        ({"ROLLPLANE_WORKER_ENGINE_OPTION": "alone"}, "expected name=value"),
    ],
)
def test_a_bad_variable_is_named(env: dict[str, str], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        load_settings(env=env)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[server]\nport = '1'", r"server\.port \(from file"),
        ("[server]\nprot = 1", r"server\.prot \(from file .*\) is not an option"),
        ("[sever]\nport = 1", "sever is not a table"),
        ("[frontend]\nworkers = [1]", r"frontend\.workers\[0\] \(from file"),
        ("port = ", "cannot be read"),
    ],
)
def test_a_bad_file_is_named_with_the_path_of_the_value(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)

    with pytest.raises(InvalidRequest, match=says):
        read_all(file)


def read_all(file: Path) -> None:
    settings = load_settings(file=file, env={})
    for record in TABLES.values():
        settings.table(record)


def test_a_file_may_be_json(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text('{"server": {"port": 7}}')

    assert load_settings(file=file, env={}).table(ServerSettings).port == 7


def test_keys_are_lines_without_comments(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\n\n  first  \nsecond\n")

    assert read_keys(file) == ["first", "second"]


def test_the_repr_says_where_values_came_from() -> None:
    settings = load_settings(env={"ROLLPLANE_SERVER_PORT": "1"})

    assert repr(settings) == "<Settings server.port<-env ROLLPLANE_SERVER_PORT>"
