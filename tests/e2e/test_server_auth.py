"""Who may call what, on every route there is: without a key, with a data key, with an admin key."""

from pathlib import Path

import pytest
from tests.e2e.server_support import GENERATE, serving, write_keys

from rollplane.engines.mock.engine import MockEngine
from rollplane.server.app import route_table
from rollplane.server.auth import Access
from rollplane.worker import Worker

PUBLIC = {"/health", "/liveness", "/ready"}
OPENAI = {"/v1/completions", "/v1/chat/completions", "/v1/chat/completions/render", "/tokenize", "/detokenize"}
SKYRL = {"/skyrl/v1/generate", "/finish_session"}
DATA = {
    GENERATE,
    "/metrics",
    "/v1/models",
    "/v1/models/{name:path}",
    "/openapi.json",
    "/docs",
    "/server_info",
    *OPENAI,
    *SKYRL,
}


def allowed(access: Access, key: str | None) -> int | None:
    """The status of a refusal, None where the route itself answers."""
    if access == "open":
        return None
    if key not in ("data-key", "admin-key"):
        return 401
    return 403 if access == "admin" and key == "data-key" else None


def test_every_route_is_for_administrators_unless_it_is_listed_here() -> None:
    for role in ("worker", "frontend"):
        for route in route_table(role):
            expected = "open" if route.path in PUBLIC else "data" if route.path in DATA else "admin"
            assert route.access == expected, route


@pytest.mark.parametrize("role", ["worker", "frontend"])
@pytest.mark.parametrize("key", [None, "wrong-key", "data-key", "admin-key"])
async def test_every_route_asks_for_its_scope(tmp_path: Path, role: str, key: str | None) -> None:
    keys = write_keys(tmp_path, data=["data-key"], admin=["admin-key"])
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with serving(Worker(MockEngine()), keys=keys, role=role) as served:
        for route in route_table(role):
            for method in sorted(route.methods or ()):
                path = route.path.replace("{name:path}", "mock").replace("{operation_id}", "op")
                async with served.session.request(method, served.url + path, headers=headers) as answer:
                    refused = allowed(route.access, key)
                    if refused is None:
                        assert answer.status not in (401, 403), (method, path)
                    else:
                        assert answer.status == refused, (method, path)
                        if method != "HEAD":
                            assert set((await answer.json())["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", ["/nowhere", "/engine/nothing", "/inference/v2/generate", "/health/", "//health"])
async def test_a_path_that_no_route_knows_needs_a_key_too(tmp_path: Path, path: str) -> None:
    keys = write_keys(tmp_path, data=["data-key"])
    async with serving(Worker(MockEngine()), keys=keys) as served:
        async with served.get(path) as answer:
            assert answer.status == 401
            assert answer.headers["WWW-Authenticate"] == "Bearer"
        async with served.get(path, headers={"Authorization": "Bearer data-key"}) as answer:
            assert answer.status == 404


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer ", "Basic data-key", "data-key", "Bearer data-key2", "Bearer DATA-KEY"]
)
async def test_only_a_whole_bearer_key_is_a_key(tmp_path: Path, header: str) -> None:
    keys = write_keys(tmp_path, data=["data-key"])
    async with (
        serving(Worker(MockEngine()), keys=keys) as served,
        served.get("/v1/models", headers={"Authorization": header}) as answer,
    ):
        assert answer.status == 401


async def test_methods_that_a_route_has_not_are_refused_after_the_key(tmp_path: Path) -> None:
    keys = write_keys(tmp_path, data=["data-key"], admin=["admin-key"])
    async with serving(Worker(MockEngine()), keys=keys) as served:
        for key, status in (("data-key", 403), ("admin-key", 405)):
            headers = {"Authorization": f"Bearer {key}"}
            async with served.session.delete(served.url + "/pause", headers=headers) as answer:
                assert answer.status == status


async def test_keys_are_read_again_when_their_file_changes(tmp_path: Path) -> None:
    keys = write_keys(tmp_path, data=["old-key"])
    async with serving(Worker(MockEngine()), keys=keys) as served:

        async def status(key: str) -> int:
            async with served.get("/v1/models", headers={"Authorization": f"Bearer {key}"}) as answer:
                return int(answer.status)

        assert (await status("old-key"), await status("new-key-2")) == (200, 401)
        (tmp_path / "data.keys").write_text("new-key-2\n")
        assert (await status("old-key"), await status("new-key-2")) == (401, 200)
        (tmp_path / "data.keys").unlink()
        assert await status("new-key-2") == 401


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "attacker.example"}, 403),
        ({"Origin": "https://attacker.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "[::1"}, 403),
        ({"Origin": "http://[x"}, 403),
        ({"Host": "localhost:8000"}, 200),
        ({"Origin": "http://127.0.0.1:3000"}, 200),
        ({}, 200),
    ],
)
async def test_without_keys_a_web_page_from_elsewhere_is_refused(headers: dict[str, str], status: int) -> None:
    """An open server on loopback is still reachable by every page in a local browser."""
    async with (
        serving(Worker(MockEngine())) as served,
        served.post("/engine/get_weight_version", {}, headers=headers) as answer,
    ):
        assert answer.status == status
