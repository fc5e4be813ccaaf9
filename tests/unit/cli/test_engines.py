"""Engines from a worker's settings."""

import pytest

from rollplane.cli.engines import build_engine
from rollplane.config import WorkerSettings
from rollplane.engines.mock.engine import MockEngine
from rollplane.errors import InvalidRequest
from rollplane.protocol.info import MoeShape


def built(**settings: object) -> MockEngine:
    engine = build_engine(WorkerSettings(engine="mock", **settings))  # type: ignore[arg-type]
    assert isinstance(engine, MockEngine)
    return engine


def test_shared_settings_reach_the_engines_own() -> None:
    settings = built(max_model_len=64, max_num_seqs=3, policy_version="v0").settings

    assert (settings.max_model_len, settings.max_num_seqs, settings.policy_version) == (64, 3, "v0")


def test_options_are_words_numbers_or_json() -> None:
    engine = built(
        engine_option={"step_s": "0.5", "sampling_mask": "true", "moe": '{"layers":2,"top_k":1,"num_experts":4}'}
    )

    assert (engine.settings.step_s, engine.settings.sampling_mask) == (0.5, True)
    assert engine.settings.moe == MoeShape(layers=2, top_k=1, num_experts=4)


def test_the_first_served_name_is_the_main_one() -> None:
    settings = built(served_model_name=["policy", "alias"]).settings

    assert (settings.model, settings.aliases) == ("policy", ("alias",))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"dtype": "bfloat16"}, "the mock engine has no setting dtype"),
        ({"engine_option": {"speed": "1"}}, "worker.engine_option.speed"),
        ({"engine_option": {"step_s": "fast"}}, "worker.engine_option.step_s"),
        ({"engine_option": {"moe": "{"}}, "worker.engine_option.moe"),
    ],
)
def test_what_an_engine_does_not_know_is_refused(settings: dict[str, object], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        built(**settings)


def test_an_engine_without_settings_cannot_be_a_worker() -> None:
    with pytest.raises(InvalidRequest, match="cannot be run as a worker"):
        build_engine(WorkerSettings(engine="remote"))


@pytest.mark.parametrize("isolate", [None, True, False])
def test_isolation_by_version_is_the_workers_where_the_engine_has_none_of_its_own(isolate: bool | None) -> None:
    assert isinstance(built(isolate_by_version=isolate), MockEngine)
