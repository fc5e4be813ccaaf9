"""An engine that was started without a tokenizer, and with a KV connector."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from tests.models.tiny import shared_model
from tests.vllm.support import ask, logprobs, prompt, running, tokens

from rollplane.engines.vllm.inprocess import VllmEngine
from rollplane.errors import InvalidRequest

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.full]

CONNECTOR = {
    "kv_connector": "EchoConnector",
    "kv_connector_module_path": "tests.vllm.echo_connector",
    "kv_role": "kv_both",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[VllmEngine]:
    arguments = ("--skip-tokenizer-init", "--kv-transfer-config", json.dumps(CONNECTOR))
    async with running(shared_model("qwen3"), *arguments) as started:
        yield started


async def test_stop_strings_are_refused_and_point_at_stop_ids(engine: VllmEngine) -> None:
    """Never accepted and ignored; the request beside it is served."""
    for stop in ("e", ["e", "the"]):
        with pytest.raises(InvalidRequest, match="stop_token_ids") as refusal:
            await ask(engine, max_tokens=8, stop=stop)
        assert refusal.value.param == "sampling_params.stop"

    assert not engine.info.capabilities.stop_strings
    assert len(tokens(await ask(engine, max_tokens=8, ignore_eos=True))) == 8


@pytest.mark.parametrize("asked", [{"bad_words": ["e"]}, {"structured_outputs": {"regex": "[ab]+"}}])
async def test_whatever_else_needs_text_is_refused_by_name(engine: VllmEngine, asked: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(asked))):
        await ask(engine, max_tokens=4, **asked)


async def test_stop_ids_and_what_clients_send_by_default_work(engine: VllmEngine) -> None:
    first = tokens(await ask(engine, max_tokens=6, temperature=0.0, ignore_eos=True))
    got = await ask(
        engine,
        max_tokens=6,
        temperature=0.0,
        top_k=-1,
        min_p=0.0,
        logprobs=1,
        skip_special_tokens=False,
        return_token_ids=True,
        stop_token_ids=[first[3]],
    )

    assert (got.choices[0].finish_reason, got.choices[0].stop_reason) == ("stop", first[3])
    assert logprobs(got).size == len(tokens(got)) == first.index(first[3]) + 1


@pytest.mark.parametrize("stream", [False, True])
async def test_transfer_parameters_reach_the_connector_and_its_answer_the_caller(
    engine: VllmEngine, stream: bool
) -> None:
    sent = {"remote": {"host": "a", "ports": [1, 2]}, "blocks": 2**53, "ratio": 0.5, "none": None}

    got = await ask(engine, stream=stream, max_tokens=3, fields={"kv_transfer_params": sent})
    without = await ask(engine, stream=stream, max_tokens=3)

    assert got.kv_transfer_params == {"asked": sent}
    assert without.kv_transfer_params is None


async def test_transfer_parameters_that_nobody_reads_are_refused(engine: VllmEngine) -> None:
    with pytest.raises(InvalidRequest, match="--ec-transfer-config") as refusal:
        await ask(engine, prompt(), max_tokens=3, fields={"ec_transfer_params": {"x": 1}})
    assert refusal.value.param == "ec_transfer_params"
