import json

import msgspec
import pytest

from rollplane.engines.grpc.media import media_model
from rollplane.engines.grpc.model_facts import read_model_facts
from rollplane.engines.grpc.proto import control_pb2 as pb
from rollplane.engines.grpc.settings import GrpcSettings
from rollplane.engines.grpc.startup import check_server_defaults, engine_info, find_world_size
from rollplane.errors import InvalidRequest
from rollplane.protocol.arrays import INT32_MAX

SERVER = {"max_model_len": 4096, "kv_block_size": 32, "max_running_requests": 128, "engine_version": "0.31.0"}
MODEL = {"model_id": "/models/m", "served_model_name": "m", "supports_token_ids_input": True}


def info(*, server=None, model=None, facts=None, **settings):
    given = GrpcSettings(**settings)
    return engine_info(
        pb.ServerInfo(**{**SERVER, **(server or {})}),
        pb.ModelInfo(**{**MODEL, **(model or {})}),
        facts=facts,
        settings=given,
        world_size=2,
        media=media_model(facts, given, engine_version="0.31.0"),
    )


def test_only_what_the_server_reports_is_offered():
    plain = info().capabilities

    assert (plain.lora, plain.features, plain.raw_media, plain.weight_transfer) == (None, [], [], [])
    assert not plain.routed_experts
    assert not plain.sampling_mask

    rich = info(
        server={
            "max_loras": 3,
            "rl_capabilities": pb.RlCapabilities(weight_transfer_enabled=True, weight_transfer_backend="nccl"),
        },
        model={"supports_lora": True, "supports_multimodal": True},
        max_lora_rank=32,
    ).capabilities

    assert rich.lora is not None
    assert (rich.lora.max, rich.lora.rank) == (3, 32)
    assert (rich.weight_transfer, rich.native_transfer, rich.sleep) == ([], "nccl", False)
    assert rich.features == ["image", "video", "audio"]


def test_raw_pixels_are_taken_only_where_the_server_does_not_normalise_them_again():
    def raw(**settings):
        return info(model={"supports_multimodal": True}, **settings).capabilities.raw_media

    assert raw() == raw(mm_device_do_normalize=True) == ["audio"]
    assert raw(mm_device_do_normalize=False) == ["image", "video", "audio"]


def test_lora_needs_slots_and_support():
    assert info(server={"max_loras": 3}).capabilities.lora is None
    assert info(model={"supports_lora": True}).capabilities.lora is None


def test_fewer_adapters_than_the_server_has_slots_may_be_asked_for_but_not_more():
    able = {"server": {"max_loras": 3}, "model": {"supports_lora": True}}
    lora = info(**able, max_loras=2).capabilities.lora
    assert lora is not None
    assert lora.max == 2
    with pytest.raises(InvalidRequest, match="max_loras 4 is above the server's own, 3"):
        info(**able, max_loras=4)
    with pytest.raises(InvalidRequest, match="max_loras 1 is above the server's own, 0"):
        info(server={"max_loras": 3}, max_loras=1)


def test_the_server_keeps_its_names_as_aliases():
    assert (info().model, info().aliases) == ("m", ["/models/m"])
    named = info(served_model_name=["policy", "p2"])
    assert (named.model, named.aliases) == ("policy", ["/models/m", "m", "p2"])


def test_an_unknown_vocabulary_is_left_to_the_server():
    assert info().vocab_bound == INT32_MAX
    assert info(vocab_size=1024).vocab_bound == 1024


def test_a_server_without_a_context_is_refused():
    with pytest.raises(InvalidRequest, match="max_model_len 0"):
        info(server={"max_model_len": 0})


@pytest.mark.parametrize(("tensor", "pipeline", "size"), [(1, 1, 1), (2, 1, 2), (2, 2, 8), (1, 3, 3)])
async def test_the_world_size_is_what_the_server_says(tensor, pipeline, size):
    said = pb.ParallelismInfo(tensor=tensor, pipeline=pipeline, world_size=size)

    assert await find_world_size(said, GrpcSettings()) == size


@pytest.mark.parametrize(("tensor", "pipeline", "size"), [(2, 1, 3), (2, 2, 2), (4, 1, 2), (0, 1, 1), (1, 0, 4)])
async def test_a_world_size_that_does_not_fit_is_refused_with_what_was_seen(tensor, pipeline, size):
    said = pb.ParallelismInfo(tensor=tensor, pipeline=pipeline, world_size=size)

    with pytest.raises(InvalidRequest, match=f"world size {size}.*{tensor} x pipeline parallelism {pipeline}"):
        await find_world_size(said, GrpcSettings())


async def test_an_old_server_without_an_http_side_is_refused():
    with pytest.raises(InvalidRequest, match="--vllm-http-endpoint"):
        await find_world_size(pb.ParallelismInfo(tensor=1, pipeline=1), GrpcSettings())


def model_directory(root, *, config, generation=None):
    (root / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (root / "generation_config.json").write_text(json.dumps(generation))
    return read_model_facts(str(root))


def test_facts_come_from_the_models_directory(tmp_path):
    facts = model_directory(
        tmp_path,
        config={
            "architectures": ["A"],
            "text_config": {"vocab_size": 99},
            "vision_config": {"spatial_merge_size": 2, "in_channels": 3, "temporal_patch_size": 2, "patch_size": 14},
            "video_token_id": 3,
            "eos_token_id": 1,
        },
        generation={"eos_token_id": [1, 2], "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05},
    )

    assert msgspec.structs.asdict(facts) == {
        "vocab_size": 99,
        "eos_token_ids": [1, 2],
        "modalities": ["image", "video"],
        "stubborn_defaults": {},  # those it has are overridden by values on the wire
        "architectures": ["A"],
        "merge": 2,
        "patch_numbers": 1176,
    }


def test_a_vision_tower_that_does_not_say_its_sizes_has_none(tmp_path):
    facts = model_directory(tmp_path, config={"vision_config": {"patch_size": 14, "spatial_merge_size": 0}})

    assert (facts.merge, facts.patch_numbers) == (None, None)


def test_a_name_that_is_no_directory_has_no_facts():
    assert read_model_facts("org/model-on-a-hub") is None


def test_a_default_that_the_wire_cannot_override_refuses_the_start(tmp_path):
    facts = model_directory(tmp_path, config={"vocab_size": 9}, generation={"min_p": 0.1, "presence_penalty": 0.0})

    with pytest.raises(InvalidRequest, match=r"min_p 0\.1"):
        check_server_defaults(facts, GrpcSettings())
    check_server_defaults(facts, GrpcSettings(allow_server_defaults=True))


def test_a_broken_config_is_named(tmp_path):
    (tmp_path / "config.json").write_text("[1")

    with pytest.raises(InvalidRequest, match=r"config\.json"):
        read_model_facts(str(tmp_path))
