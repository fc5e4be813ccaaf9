"""Nothing that other weights computed is ever read from a cache, through every hop that can change weights."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.e2e.fleets import write_weights
from tests.e2e.hops import FRONTEND, FULL_HOPS, HOPS, chain
from tests.e2e.server_support import Served, eventually
from tests.models import tiny

from rollplane.engines.embedded.engine import EmbeddedEngine
from rollplane.engines.embedded.settings import EmbeddedSettings
from rollplane.engines.mock.settings import MockSettings

PROMPT = list(range(100, 180))  # five blocks of 16


def ask(*, prompt: list[int] | None = None, model: str | None = None, **sampling: Any) -> dict[str, Any]:
    body = {"token_ids": prompt or PROMPT, "sampling_params": {"max_tokens": 12, "seed": 3, "ignore_eos": True}}
    body["sampling_params"] |= sampling  # type: ignore[operator]
    return body if model is None else {**body, "model": model}


def cached(tree: dict[str, Any]) -> int:
    return int(tree["usage"]["prompt_tokens_details"]["cached_tokens"])


async def post(edge: Served, path: str, body: Any = None) -> dict[str, Any]:
    async with edge.post(path, body if body is not None else {}) as answer:
        content = await answer.read()
        assert answer.status == 200, content
        return dict(json.loads(content)) if content.startswith(b"{") else {}


def write_adapter(path: Path, value: float) -> str:
    path.mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (path / "adapter_config.json").write_text(json.dumps(config))
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {
        f"{name}.lora_A.weight": np.full((4, 8), value, np.float32),
        f"{name}.lora_B.weight": np.full((8, 4), value, np.float32),
    }
    save_file(tensors, path / "adapter_model.safetensors")
    return str(path)


@pytest.mark.parametrize("hops", FULL_HOPS)
async def test_after_an_update_a_prompt_is_computed_anew_and_answered_as_by_a_fresh_server(
    hops: str, tmp_path: Path
) -> None:
    weights = write_weights(tmp_path, "v1")
    async with chain(hops, MockSettings()) as made:
        old = await made.edge.generate(ask())
        assert cached(await made.edge.generate(ask())) > 0
        await post(made.edge, "/update_weights", {"weight_dir": weights})
        new, again = [await made.edge.generate(ask()) for _ in range(2)]
    async with chain(hops, MockSettings()) as fresh:
        await post(fresh.edge, "/update_weights", {"weight_dir": weights})
        wanted = await fresh.edge.generate(ask())

    assert cached(new) == 0
    assert cached(again) > 0
    assert new["choices"][0]["token_ids"] == wanted["choices"][0]["token_ids"] != old["choices"][0]["token_ids"]
    assert new["choices"][0]["policy_versions"] == [["v1", 0]]


@pytest.mark.parametrize("hops", FULL_HOPS)
async def test_an_adapter_reloaded_under_its_name_shares_nothing_with_the_old_one(hops: str, tmp_path: Path) -> None:
    one, two = write_adapter(tmp_path / "one", 1.0), write_adapter(tmp_path / "two", 2.0)
    async with chain(hops, MockSettings()) as made:
        await post(made.edge, "/load_lora_adapter", {"lora_name": "a", "lora_path": one})
        old = await made.edge.generate(ask(model="a"))
        assert cached(await made.edge.generate(ask(model="a"))) > 0
        await post(made.edge, "/load_lora_adapter", {"lora_name": "a", "lora_path": two})
        new, again = [await made.edge.generate(ask(model="a")) for _ in range(2)]
    async with chain(hops, MockSettings()) as fresh:
        await post(fresh.edge, "/load_lora_adapter", {"lora_name": "a", "lora_path": two})
        wanted = await fresh.edge.generate(ask(model="a"))

    assert cached(new) == 0
    assert cached(again) > 0
    assert new["choices"][0]["token_ids"] == wanted["choices"][0]["token_ids"] != old["choices"][0]["token_ids"]


@pytest.mark.parametrize("nested", [False, True], ids=["top-level", "in-sampling-params"])
@pytest.mark.parametrize("hops", FULL_HOPS)
async def test_a_salt_separates_caches_wherever_it_is_said(hops: str, nested: bool) -> None:
    async with chain(hops, MockSettings()) as made:
        found = []
        for salt in ("v1", "v1", "v2"):
            body = ask(cache_salt=salt) if nested else {**ask(), "cache_salt": salt}
            found.append(cached(await made.edge.generate(body)))

    assert found[0] == found[2] == 0
    assert found[1] > 0


@pytest.mark.parametrize("hops", HOPS)
async def test_two_salts_that_differ_are_a_conflict(hops: str) -> None:
    async with chain(hops, MockSettings()) as made:
        refused = await made.edge.generate({**ask(cache_salt="v1"), "cache_salt": "v2"}, status=400)

    assert "cache_salt" in refused["error"]["param"]


async def test_a_sample_keeps_its_adapter_until_it_ends_while_the_name_is_unloaded(tmp_path: Path) -> None:
    model = tiny.shared_model("qwen3", layers=2)
    adapter = str(tiny.make_lora(tmp_path / "a", base=model, seed=1))
    engine = EmbeddedEngine(EmbeddedSettings(model=str(model), threads=1, max_model_len=1024))
    body = ask(prompt=[5, 6, 7], max_tokens=250, model="a")
    async with chain(FRONTEND, engine) as made:
        await post(made.edge, "/load_lora_adapter", {"lora_name": "a", "lora_path": adapter})
        alone = await made.edge.generate(body)
        base = await made.edge.generate(ask(prompt=[5, 6, 7], max_tokens=250))
        running = asyncio.create_task(made.edge.generate(body))

        async def runs() -> bool:
            return (await engine.health()).running == 1

        async def gone() -> bool:
            async with made.edge.post(
                "/inference/v1/generate", ask(prompt=[5, 6, 7], max_tokens=1, model="a")
            ) as answer:
                return bool(answer.status == 404)

        await eventually(runs)
        unloading = asyncio.create_task(post(made.edge, "/v1/unload_lora_adapter", {"lora_name": "a"}))
        await eventually(gone)
        assert not running.done(), "the sample ended before the unload, so this test would show nothing"
        during = await running
        await unloading

    assert during["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"] != base["choices"][0]["token_ids"]
    assert during["choices"][0]["finish_reason"] == "length"
