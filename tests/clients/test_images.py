"""Clients with images against vLLM in process: PyPI `renderers`, and TRL, which lets the server make the features."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.clients.conftest import model_directory, with_tool_tokens, worker
from tests.clients.scripts import PYTHON, found_by, trl
from tests.real.processes import ROOT

SITE = ROOT / ".venv-clients" / "lib"


@pytest.fixture(scope="module")
def vision_model() -> Path:
    return model_directory("qwen-vl")


@pytest.fixture(scope="module")
def vision_server(vision_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    assert PYTHON.exists(), "run scripts/make_vllm_env.sh"
    options = ["--engine", "vllm", "--model", str(vision_model), "--dtype", "float32", "--max-model-len", "2048"]
    own = ["--enforce-eager", "--limit-mm-per-prompt", '{"image": 4}', "--mm-processor-cache-gb", "0.1"]
    with worker(tmp_path_factory.mktemp("vision"), *options, "--", *own, python=PYTHON) as url:
        yield url


@pytest.fixture(scope="module")
def answers(vision_server: str, vision_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    tokenizer = with_tool_tokens(vision_model, tmp_path_factory.mktemp("tokenizer"))
    # Behind vLLM's own packages, not before them: only what that environment lacks comes from here.
    clients = next(SITE.glob("python3*")) / "site-packages"
    run = "import runpy, sys; sys.path.append(sys.argv.pop(1)); sys.argv.pop(0); runpy.run_path(sys.argv[0])"
    script = Path(__file__).with_name("image_client.py")
    found: dict[str, Any] = found_by(["-c", run, str(clients), str(script), vision_server, str(tokenizer)])
    return found


def test_renderers_gets_one_answer_both_ways(answers: dict[str, Any]) -> None:
    for colour in ("red", "blue"):
        features, parts = answers[f"{colour} features"], answers[f"{colour} content_parts"]
        assert features["ids"] == parts["ids"]
        assert features["prompt"] == parts["prompt"]
        assert features["logprobs"] == pytest.approx(parts["logprobs"], abs=1e-3)


def test_the_image_is_seen(answers: dict[str, Any]) -> None:
    assert answers["red features"]["logprobs"] != pytest.approx(answers["blue features"]["logprobs"], abs=1e-3)


@pytest.fixture(scope="module")
def trl_answers(vision_server: str) -> dict[str, Any]:
    found: dict[str, Any] = trl("trl_images.py", vision_server)
    return found


def test_trl_generates_from_features_that_the_server_rendered_as_it_chats_with_the_image(
    trl_answers: dict[str, Any],
) -> None:
    for colour in ("red", "blue"):
        found = trl_answers[colour]
        assert found["without"] is None
        assert len(found["generated"]) == 2
        assert found["generated"] == found["chat"]
        for made, chatted in zip(found["generated_logprobs"], found["chat_logprobs"], strict=True):
            assert made == pytest.approx(chatted, abs=1e-3)
    assert trl_answers["red"]["generated_logprobs"] != trl_answers["blue"]["generated_logprobs"]
