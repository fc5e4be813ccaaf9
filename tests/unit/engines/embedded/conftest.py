from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.models import tiny
from transformers import AutoConfig, AutoModelForCausalLM

from rollplane.engines.embedded.core import Core, CoreSettings
from rollplane.engines.embedded.engine import EmbeddedEngine
from rollplane.engines.embedded.model import CausalModel, load_model
from rollplane.engines.embedded.results import Ending
from rollplane.engines.embedded.sequence import Generation
from rollplane.engines.embedded.settings import EmbeddedSettings
from rollplane.engines.embedded.stops import load_tokenizer
from rollplane.protocol.artifacts import PromptLogprobs

torch.set_num_threads(1)


@dataclass
class Finished:
    """One sequence's emissions, joined."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    pieces: int = 0
    alternatives: Any = None
    prompt_logprobs: PromptLogprobs | None = None
    floored: int = 0
    ending: Ending | None = None

    @property
    def end(self) -> Ending:
        assert self.ending is not None
        return self.ending


class Runner:
    """A core and what it has emitted so far."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.done: dict[tuple[str, int], Finished] = {}

    def take(self, emissions: Iterable[Any]) -> None:
        for e in emissions:
            found = self.done.setdefault((e.sequence.request.request_id, e.sequence.index), Finished())
            found.tokens += e.token_ids.tolist()
            found.pieces += 1
            found.floored += e.floored
            if e.logprobs is not None:
                found.logprobs += e.logprobs.values.tolist()
                found.ranks += e.logprobs.ranks.tolist()
                found.alternatives = e.logprobs.alternatives
            found.prompt_logprobs = found.prompt_logprobs or e.prompt_logprobs
            assert found.ending is None
            found.ending = e.ending

    def submit(self, *requests: Generation) -> "Runner":
        for request in requests:
            self.core.submit(request)
        return self

    def steps(self, count: int) -> "Runner":
        for _ in range(count):
            self.take(self.core.step())
        return self

    def finish(self) -> dict[tuple[str, int], Finished]:
        while not self.core.idle:
            self.take(self.core.step())
        return self.done

    def only(self) -> Finished:
        [found] = self.finish().values()
        return found


@pytest.fixture(scope="session")
def moe_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_moe(tmp_path_factory.mktemp("moe"), layers=2, experts=8)


@pytest.fixture(scope="session")
def moe(moe_dir: Path) -> CausalModel:
    return load_model(moe_dir)


@pytest.fixture
async def engine(moe_dir: Path) -> AsyncIterator[EmbeddedEngine]:
    made = EmbeddedEngine(EmbeddedSettings(model=str(moe_dir), policy_version="v0", threads=1))
    await made.start()
    yield made
    await made.close()


@pytest.fixture(scope="session")
def dense_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_dense(tmp_path_factory.mktemp("dense"), layers=2)


@pytest.fixture
def make_runner(moe: CausalModel) -> Callable[..., Runner]:
    def make(model: CausalModel | None = None, **settings: Any) -> Runner:
        model = model or moe
        return Runner(Core(model, CoreSettings(**settings), tokenizer=load_tokenizer(model.directory), version="v0"))

    return make


@pytest.fixture
def ask() -> Callable[..., Generation]:
    """A request with a reproducible random prompt of `prompt` tokens (or those given)."""

    def make(request_id: str = "r", prompt: int | list[int] = 12, **fields: Any) -> Generation:
        if isinstance(prompt, int):
            rng = np.random.default_rng(sum(request_id.encode()))
            ids = rng.integers(7, tiny.VOCABULARY, prompt).astype(np.int32)
        else:
            ids = np.array(prompt, dtype=np.int32)
        defaults = {"max_tokens": 8, "seed": 1, "ignore_eos": True}
        return Generation(request_id=request_id, prompt=ids, **{**defaults, **fields})

    return make


@pytest.fixture
def make_other_moe() -> Callable[[str, Path], Path]:
    """A tiny mixture of a family that `tests.models.tiny` does not make; qwen2_moe has a shared expert too."""

    def make(kind: str, path: Path) -> Path:
        config = AutoConfig.for_model(
            kind,
            vocab_size=tiny.VOCABULARY,
            hidden_size=64,
            intermediate_size=64,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            num_experts=4,
            num_experts_per_tok=2,
            initializer_range=0.1,
            use_sliding_window=False,
            max_position_embeddings=256,
            pad_token_id=0,
            eos_token_id=2,
        )
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
        return path

    return make
