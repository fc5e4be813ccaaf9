"""The content identity of a set of torch tensors. Import it lazily: it loads torch."""

import hashlib
import struct
from collections.abc import Mapping

import torch
from torch import Tensor


def content_digest(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over (name, dtype, shape, bytes) of every tensor in the order of names; 64 hex digits.

    It does not depend on how a checkpoint is cut into files, nor on the device.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        head = f"{name}\0{tensor.dtype}\0{','.join(map(str, tensor.shape))}".encode()
        digest.update(struct.pack(">Q", len(head)))
        digest.update(head)
        digest.update(struct.pack(">Q", tensor.numel() * tensor.element_size()))
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
