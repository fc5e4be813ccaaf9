"""The committed generated code is what its .proto files say, and they have the wire's names and numbers."""

import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from rollplane.engines.grpc.proto import answers_pb2, control_pb2, inference_pb2
from rollplane.engines.grpc.services import CONTROL, INFERENCE, method_path

SRC = Path(__file__).parents[4] / "src"


@pytest.mark.parametrize("module", [inference_pb2, control_pb2, answers_pb2])
def test_generated_code_is_current(module, tmp_path):
    name = module.DESCRIPTOR.name
    out = tmp_path / "set.binpb"
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(SRC), f"--descriptor_set_out={out}", name]
    subprocess.run(command, check=True, cwd=SRC)
    (compiled,) = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    committed = descriptor_pb2.FileDescriptorProto()
    module.DESCRIPTOR.CopyToProto(committed)
    for file in (compiled, committed):
        forget_json_names(file.message_type)

    assert compiled == committed, "run scripts/generate_grpc.sh"


def forget_json_names(messages):
    for message in messages:
        for field in message.field:
            field.ClearField("json_name")
        forget_json_names(message.nested_type)


@pytest.mark.parametrize(
    ("message", "numbers"),
    [
        (
            inference_pb2.GenerateRequest,
            "request_id=1 model=2 text=3 token_ids=4 temperature=5 sampling=6 decoding=7 stopping=8 response=9 kv=10 "
            "truncate_prompt_tokens=11 priority=12 session_id=13 media=14 lora_name=15",
        ),
        (inference_pb2.RandomSampling, "num_sequences=1 top_k=2 top_p=3 min_p=4 seed=5"),
        (
            inference_pb2.PreprocessedMediaFeatures,
            "kwargs=1 identifier=2 offset=3 length=4 mm_hash=5 is_embed=6",
        ),
        (inference_pb2.MediaItem, "modality=1 url=2 data_uri=3 raw_bytes=4 features=7 mime_type=5 uuid=6"),
        (
            inference_pb2.SequenceOutput,
            "index=1 text=2 num_tokens=3 token_ids=4 logprobs=5 ranks=6 candidate_tokens=7 finish_info=8",
        ),
        (
            inference_pb2.FinishInfo,
            "num_output_tokens=1 finish_reason=2 stop_token_id=3 eos_token_id=4 stop_string=5 kv_transfer_params=6 "
            "ec_transfer_params=8",
        ),
        (
            control_pb2.ParallelismInfo,
            "tensor=1 pipeline=2 data=3 data_parallel_rank=4 decode_context=5 world_size=6 data_parallel_size_local=7",
        ),
        (
            control_pb2.RlCapabilities,
            "weight_transfer_enabled=1 weight_transfer_backend=2 sleep_mode_enabled=3 draft_weight_updates_enabled=4",
        ),
    ],
)
def test_fields_have_the_numbers_of_the_wire(message, numbers):
    fields = sorted(message.DESCRIPTOR.fields, key=lambda field: field.name)

    assert " ".join(f"{field.name}={field.number}" for field in fields) == " ".join(sorted(numbers.split()))


@pytest.mark.parametrize("name", ["GenerateResponse", "PromptInfo", "SequenceOutput"])
def test_the_readers_view_is_of_the_same_wire(name):
    whole = {field.number: field for field in getattr(inference_pb2, name).DESCRIPTOR.fields}

    for field in getattr(answers_pb2, name).DESCRIPTOR.fields:
        same = whole[field.number]
        assert (field.name, field.is_repeated) == (same.name, same.is_repeated)
        undecoded = {field.TYPE_MESSAGE, field.TYPE_FLOAT, field.TYPE_UINT32}
        assert field.type == same.type or (field.type == field.TYPE_BYTES and same.type in undecoded)


def test_methods_have_the_paths_of_the_wire():
    assert [method_path(m) for m in INFERENCE.methods] == ["/vllm.Inference/Generate", "/vllm.Inference/GenerateStream"]
    assert [m.server_streaming for m in INFERENCE.methods] == [False, True]
    assert len(CONTROL.methods) == 21
    assert method_path(CONTROL.methods_by_name["LoadLora"]) == "/vllm.Control/LoadLora"
