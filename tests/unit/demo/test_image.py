"""The image run without its servers: the model's ids, pictures, what the trainer sees, and when a step fails."""

import base64
import io
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from tests.models.qwen_features import element, payload, tensor
from transformers import AutoConfig, AutoTokenizer

from rollplane.demo.image.model import IMAGE_PAD, VISION_END, VISION_START, make_policy
from rollplane.demo.image.pictures import COLOURS, Rendered, pixels_of, png
from rollplane.demo.image.run import ImageReport, ImageStep, Sampled, letter_id, rewards_of, support
from rollplane.demo.image.servers import free_ports, running
from rollplane.demo.image.trainer import Trainer
from rollplane.errors import EngineProtocolError, Unavailable

GRID = (1, 4, 4)


def rendered(colour: str, *, fill: float) -> Rendered:
    """What the renderer makes of a picture, with one number for its pixels."""
    raw = payload(
        pixel_values=element(tensor(np.full((16, 1176), fill, np.float32)), kind="flat"),
        image_grid_thw=element(tensor(np.array(GRID, np.int64))),
    )
    ids = [VISION_START, *[IMAGE_PAD] * 4, VISION_END, 50, 60]
    features = {
        "mm_hashes": {"image": [colour]},
        "mm_placeholders": {"image": [{"offset": 1, "length": 4}]},
        "kwargs_data": {"image": [base64.b64encode(raw).decode()]},
    }
    return Rendered(colour=colour, token_ids=ids, features=features)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("image") / "Qwen2.5-VL-tiny", seed=0)


@pytest.fixture
def trainer(model: Path) -> Trainer:
    pictures = [rendered(name, fill=i / 4) for i, name in enumerate(COLOURS)]
    return Trainer(model, pictures=pictures, support=support(), seed=0)


def sampled(seed: int, *, choices: int = 6, length: int = 2) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    return [rng.choice(support(), size=(choices, length)).astype(np.int32) for _ in COLOURS]


def test_the_letters_are_ids_of_the_models_tokenizer(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)

    assert [tokenizer.encode(name[0]) for name in COLOURS] == [[letter] for letter in support()]
    assert tokenizer.encode("~") == [letter_id("~")]
    assert len(tokenizer) == AutoConfig.from_pretrained(model).text_config.vocab_size


@pytest.mark.parametrize("colour", COLOURS.values())
def test_a_picture_is_of_its_colour(colour: tuple[int, int, int]) -> None:
    image = Image.open(io.BytesIO(png(colour, side=3)))

    assert (image.size, image.mode) == ((3, 3), "RGB")
    assert set(image.get_flattened_data()) == {colour}


def test_the_trainer_gets_the_bytes_that_the_engine_gets() -> None:
    pixels, grid = pixels_of(rendered("red", fill=0.25))

    assert (pixels.shape, grid.tolist()) == ((16, 1176), list(GRID))
    assert set(pixels.ravel().tolist()) == {0.25}


def test_pixels_that_the_engine_would_normalise_are_refused() -> None:
    raw = payload(
        pixel_values=element(tensor(np.zeros((16, 1176), np.uint8)), kind="flat"),
        image_grid_thw=element(tensor(np.array(GRID, np.int64))),
    )
    picture = rendered("red", fill=0.0)
    picture.features["kwargs_data"]["image"] = [base64.b64encode(raw).decode()]

    with pytest.raises(EngineProtocolError, match="pixels are uint8"):
        pixels_of(picture)


def test_no_pickle_is_read() -> None:
    picture = rendered("red", fill=0.0)
    raw = msgspec.msgpack.encode({"pixel_values": {"data": msgspec.msgpack.Ext(1, b"x")}})
    picture.features["kwargs_data"]["image"] = [base64.b64encode(raw).decode()]

    with pytest.raises(EngineProtocolError, match="extension 1"):
        pixels_of(picture)


def test_scores_are_a_distribution_over_the_support_and_depend_on_the_picture(trainer: Trainer) -> None:
    letters = [[np.array([[letter]], np.int32)] * len(COLOURS) for letter in support()]
    with torch.no_grad():
        scores = torch.stack([trainer.score(tokens)[:, 0, 0] for tokens in letters])

    torch.testing.assert_close(scores.exp().sum(dim=0), torch.ones(len(COLOURS)))
    assert len({tuple(column.tolist()) for column in scores.T}) == len(COLOURS)


def test_a_step_makes_what_was_rewarded_likelier_and_other_weights_come_and_go(trainer: Trainer) -> None:
    tokens = sampled(0)
    before, own = trainer.weights(), trainer.score(tokens).detach()
    rewards = np.stack([(each == letter).mean(axis=1) for each, letter in zip(tokens, support(), strict=True)])

    trainer.learn(tokens, rewards)

    after = trainer.score(tokens).detach()
    advantages = torch.from_numpy(rewards - rewards.mean(axis=1, keepdims=True)).float()[..., None]
    assert float((advantages * (after - own)).sum()) > 0
    torch.testing.assert_close(trainer.score_with(before, tokens), own)
    torch.testing.assert_close(trainer.score(tokens).detach(), after)


def test_a_reward_is_the_share_of_right_letters() -> None:
    right, wrong = support()[0], support()[1]
    tokens = [np.array([[right, right], [right, wrong]], np.int32)] + [np.zeros((2, 2), np.int32)] * 3
    rollout = Sampled(tokens=tokens, logprobs=[], generations=set())

    assert rewards_of(rollout).tolist() == [[1.0, 0.5], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]


def test_the_report_has_the_mismatch_of_every_step() -> None:
    step = ImageStep(
        step=1, version="v1", reward=0.5, mismatch_kl=1e-9, previous_kl=0.1, probe_before=0.2, probe_after=0.3
    )
    report = ImageReport(steps=[step], policy_versions=["v0", "v1"], reward_before=0.1, reward_after=0.5, passed=True)

    assert report.plain()["mismatch_kl"] == [1e-9]
    assert report.plain()["steps"][0]["passed"] is True
    step.failures.append("no")
    assert report.plain()["steps"][0]["passed"] is False


def test_a_server_that_ends_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    words = ["bash", "-c", "echo broken; exit 3"]
    with (
        pytest.raises(Unavailable, match=r"exit code 3.*\nbroken"),
        running(words, log=tmp_path / "log", environment={}, health=f"http://127.0.0.1:{port}/"),
    ):
        pass
