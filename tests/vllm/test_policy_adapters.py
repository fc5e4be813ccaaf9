"""Adapter versions from the file system on a real vLLM; transformers with the factors merged says what each makes."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.e2e.server_support import Served, eventually, serving
from tests.models.tiny import shared_model
from tests.vllm.reference import Reference
from tests.vllm.support import LastingEngine, prompt

from rollplane.client.admin import AdminClient
from rollplane.engines.vllm.adapters import Adapters
from rollplane.errors import EngineFailed, NotFound
from rollplane.protocol.response import GenerateResponse
from rollplane.testing import answer, make_request, watching
from rollplane.worker import Worker

pytestmark = pytest.mark.asyncio(loop_scope="session")

NAME = "step"


@pytest_asyncio.fixture(loop_scope="session")
async def served(lora_engine: LastingEngine) -> AsyncIterator[Served]:
    async with serving(Worker(lora_engine)) as found:
        yield found


def merged(path: str) -> Reference:
    return Reference(shared_model("qwen3"), adapter=path)


def worker_of(served: Served) -> Worker:
    assert served.service.worker is not None
    return served.service.worker


async def greedy(served: Served, model: str | None, max_tokens: int = 12) -> GenerateResponse:
    sampling: dict[str, Any] = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, "logprobs": 0}
    return await answer(worker_of(served), make_request(prompt(), fields={"model": model}, **sampling))


async def generations(served: Served) -> list[tuple[int, str, int]]:
    return [(record.generation, record.state, record.leases) for record in await worker_of(served).adapters()]


async def test_four_versions_under_one_name_take_effect_one_by_one(served: Served, lora_paths: list[str]) -> None:
    made = set()
    async with AdminClient(served.url) as admin:
        for i, path in enumerate(lora_paths):
            record = await admin.load_adapter(NAME, path)
            assert (record.generation, record.engine_name) == (i + 1, f"{NAME}@{i + 1}")
            response = await greedy(served, NAME)
            merged(path).check(prompt(), response)
            assert response.served_by.adapter_generation == i + 1
            made.add(tuple(response.choices[0].token_ids.tolist()))
    Reference(shared_model("qwen3")).check(prompt(), await greedy(served, None))

    assert len(made) == 4

    async def one_is_left() -> bool:
        return await generations(served) == [(4, "ready", 0)]

    await eventually(one_is_left)


async def test_a_request_keeps_the_generation_it_began_with_and_that_goes_with_its_last_lease(
    served: Served, lora_paths: list[str]
) -> None:
    old, new = lora_paths[:2]
    worker = worker_of(served)
    await worker.load_adapter(NAME, old)
    sampling: dict[str, Any] = {"temperature": 0.0, "max_tokens": 600, "ignore_eos": True, "logprobs": 0}
    request = make_request(prompt(), stream=True, fields={"model": NAME}, **sampling)
    async with watching(worker, request) as (watch,):
        await watch.until_tokens(3)
        async with asyncio.timeout(10):
            await worker.load_adapter(NAME, new)
        merged(new).check(prompt(), await greedy(served, NAME))
        assert await generations(served) == [(1, "draining", 1), (2, "ready", 0)]
        assert not watch.over
        lived = await watch.answer()

    merged(old).check(prompt(), lived)
    assert lived.served_by.adapter_generation == 1

    async def old_is_gone() -> bool:
        return await generations(served) == [(2, "ready", 0)]

    await eventually(old_is_gone)


async def test_base_and_adapters_in_one_batch_do_not_mix(served: Served, lora_paths: list[str]) -> None:
    """Every slot is taken, and vLLM's CPU kernels would give the last one's adapter to the rows that have none."""
    worker = worker_of(served)
    models: list[str | None] = [None, "one", "two"]
    for name, path in zip(("one", "two"), lora_paths, strict=False):
        await worker.load_adapter(name, path)

    answers = await asyncio.gather(*(greedy(served, model, max_tokens=40) for model in (*models, *models)))

    references = [Reference(shared_model("qwen3")), merged(lora_paths[0]), merged(lora_paths[1])]
    for reference, response in zip((*references, *references), answers, strict=True):
        reference.check(prompt(), response)
    references[0].check(prompt(), await greedy(served, None, max_tokens=40))


async def test_weights_do_not_change_while_an_adapter_could_not_be_put_back_and_nothing_ends(
    served: Served, lora_paths: list[str], tmp_path: Path
) -> None:
    """A change of weights drops every adapter; left to the next request, vLLM would read the files and end."""
    files = Path(shutil.copytree(lora_paths[0], tmp_path / "adapter"))
    worker = worker_of(served)
    await worker.load_adapter(NAME, str(files))
    base = await greedy(served, None)
    wanted = (await greedy(served, NAME)).choices[0].token_ids.tolist()
    await asyncio.to_thread(files.rename, tmp_path / "elsewhere")
    with pytest.raises(EngineFailed, match=r"'step@1' could not be put back .*nothing was touched"):
        await worker.update_from_disk(str(shared_model("qwen3", seed=1)), version="v1")
    assert (await greedy(served, NAME)).choices[0].token_ids.tolist() == wanted
    assert (await greedy(served, None)).choices[0].token_ids.tolist() == base.choices[0].token_ids.tolist()

    await asyncio.to_thread((tmp_path / "elsewhere").rename, files)
    await worker.update_from_disk(str(shared_model("qwen3", seed=1)), version="v1")
    assert (await greedy(served, NAME)).choices[0].token_ids.tolist() != wanted
    await worker.update_from_disk(str(shared_model("qwen3")), version="v2")
    assert (await greedy(served, NAME)).choices[0].token_ids.tolist() == wanted


async def test_a_kept_request_whose_adapter_is_lost_ends_with_an_error_and_the_engine_lives(
    served: Served, lora_paths: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files went between the check and the change."""
    files = Path(shutil.copytree(lora_paths[0], tmp_path / "adapter"))
    worker = worker_of(served)
    await worker.load_adapter(NAME, str(files))
    base = (await greedy(served, None)).choices[0].token_ids.tolist()
    sampling: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1500, "ignore_eos": True}
    request = make_request(prompt(), stream=True, fields={"model": NAME}, **sampling)
    async with watching(worker, request) as (watch,):
        await watch.until_tokens(3)

        async def gone(_: Adapters) -> None:
            shutil.rmtree(files)

        monkeypatch.setattr(Adapters, "check_files", gone)
        await worker.update_from_disk(str(shared_model("qwen3", seed=1)), version="v1")
        monkeypatch.undo()
        await asyncio.wait([watch.task], timeout=20)
        assert "was lost with a change of weights" in str(watch.error)
    with pytest.raises(NotFound):
        await greedy(served, NAME)
    await worker.load_adapter(NAME, lora_paths[1])
    await worker.update_from_disk(str(shared_model("qwen3")), version="v2")
    assert (await greedy(served, None)).choices[0].token_ids.tolist() == base
    merged(lora_paths[1]).check(prompt(), await greedy(served, NAME))
