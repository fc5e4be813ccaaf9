"""Administration on a port of its own, and TLS, on real sockets."""

import asyncio
import contextlib
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import pytest
from tests.e2e.server_support import GENERATE, write_keys

from rollplane.cli.supervisor import held_port
from rollplane.config import ServerSettings
from rollplane.engines.mock.engine import MockEngine
from rollplane.errors import InvalidRequest
from rollplane.server import ops
from rollplane.server.app import create_app, route_table
from rollplane.server.auth import KeyRing
from rollplane.server.metrics import Metrics
from rollplane.server.service import Service
from rollplane.worker import Worker

ADMIN = {"Authorization": "Bearer admin-key"}
BODY = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 2}}


@contextlib.asynccontextmanager
async def running(settings: ServerSettings, keys: KeyRing) -> AsyncIterator[tuple[str, str]]:
    """A worker served by `ops.run`, as the command does it: the addresses of both listeners."""
    worker = Worker(MockEngine())
    await worker.start()
    sock, admin_sock = ops.bind(settings), ops.bind_admin(settings)
    service = Service(
        role="worker", engine=worker, admin=worker, worker=worker, settings=settings, keys=keys, metrics=Metrics(),
        admin_port=ops.port_of(admin_sock),
    )  # fmt: skip
    ready = asyncio.Event()
    task = asyncio.create_task(ops.run(create_app(service), service, sock, admin_sock=admin_sock, on_ready=ready.set))
    try:
        async with asyncio.timeout(10):
            await ready.wait()
        tls = settings.tls_cert_file is not None
        yield ops.url_of(sock, tls=tls), ops.url_of(admin_sock or sock, tls=tls)
    finally:
        service.lifecycle.stopping.set()
        await task


def settings(**given: object) -> ServerSettings:
    return msgspec.convert({"host": "127.0.0.1", "port": 0, "drain_s": 0.5, **given}, ServerSettings)


async def test_administration_is_not_there_on_the_first_port_even_with_an_admin_key(tmp_path: Path) -> None:
    keys = write_keys(tmp_path, data=["data-key"], admin=["admin-key"])
    async with running(settings(admin_port=0), keys) as (data, admin), aiohttp.ClientSession(headers=ADMIN) as session:
        for route in route_table("worker"):
            if route.access != "admin" or "{" in route.path:
                continue
            method = "GET" if "GET" in (route.methods or ()) else "POST"
            async with session.request(method, data + route.path, headers={"Host": admin.split("//")[1]}) as answer:
                assert answer.status == 404, route
                assert "own port" in (await answer.json())["error"]["message"]
        async with session.post(data + GENERATE, json=BODY) as answer:
            assert answer.status == 200
        async with session.post(admin + "/engine/pause_generation") as answer:
            assert answer.status == 200
        async with session.post(admin + "/engine/resume_generation") as answer:
            assert answer.status == 200
        async with session.post(admin + GENERATE, json=BODY) as answer:
            assert answer.status == 200


async def test_without_a_port_of_its_own_administration_shares_the_first(tmp_path: Path) -> None:
    keys = write_keys(tmp_path, admin=["admin-key"])
    async with running(settings(), keys) as (data, admin), aiohttp.ClientSession(headers=ADMIN) as session:
        assert data == admin
        async with session.get(data + "/v1/rl/workers") as answer:
            assert answer.status == 200


def test_one_port_for_both_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"server\.admin_port is server\.port, 8123"):
        ops.bind_admin(settings(port=8123, admin_port=8123))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    root = tmp_path_factory.mktemp("tls")
    cert, key = str(root / "cert.pem"), str(root / "key.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


async def test_with_a_certificate_both_listeners_speak_tls_only(certificate: tuple[str, str], tmp_path: Path) -> None:
    cert, key = certificate
    with_tls = settings(admin_port=0, tls_cert_file=cert, tls_key_file=key)
    ops.check_tls(with_tls)
    trust = ssl.create_default_context(cafile=cert)
    keys = write_keys(tmp_path, admin=["admin-key"])
    async with running(with_tls, keys) as (data, admin), aiohttp.ClientSession(headers=ADMIN) as session:
        for url in (data, admin):
            assert url.startswith("https://127.0.0.1:")
            async with session.post(url + GENERATE, json=BODY, ssl=trust) as answer:
                assert answer.status == 200
            with pytest.raises(aiohttp.ClientConnectionError):
                await session.get(url.replace("https", "http") + "/health")


def test_half_a_certificate_or_a_bad_one_is_refused_at_the_start(certificate: tuple[str, str], tmp_path: Path) -> None:
    cert, key = certificate
    with pytest.raises(InvalidRequest, match="go together"):
        ops.check_tls(settings(tls_cert_file=cert))
    with pytest.raises(InvalidRequest, match="cannot be used"):
        ops.check_tls(settings(tls_cert_file=cert, tls_key_file=str(tmp_path / "absent")))
    with pytest.raises(InvalidRequest, match="cannot be used"):
        ops.check_tls(settings(tls_cert_file=key, tls_key_file=cert))


def test_a_port_that_is_held_for_a_child_is_the_childs_alone_through_its_restarts() -> None:
    with contextlib.ExitStack() as held:
        ports = [held_port("127.0.0.1", held) for _ in range(8)]
        assert len(set(ports)) == 8
        settings = ServerSettings(port=ports[0])
        for _ in range(2):  # a child, and the one after it
            with pytest.raises(OSError, match="in use"), socket.socket() as other:
                other.bind(("127.0.0.1", ports[0]))
            with ops.bind(settings) as sock:
                sock.listen()
                with pytest.raises(InvalidRequest, match="cannot listen"):
                    ops.bind(settings)
