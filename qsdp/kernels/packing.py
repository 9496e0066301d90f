"""Codes of a block to bytes and back; the order is in :mod:`qsdp.wire`."""

from __future__ import annotations

import torch

from qsdp.wire import planes


def pack(code: torch.Tensor, bits: int) -> torch.Tensor:
    """(..., numel) uint8 codes to (..., code_bytes) uint8."""
    parts = []
    for width, shift in planes(bits):
        per_byte = 8 // width
        plane = (code >> shift) & ((1 << width) - 1)
        plane = torch.nn.functional.pad(plane, (0, -plane.shape[-1] % per_byte))
        places = torch.arange(0, 8, width, dtype=torch.uint8, device=code.device)
        parts.append((plane.unflatten(-1, (-1, per_byte)) << places).sum(-1, dtype=torch.uint8))
    return torch.cat(parts, dim=-1)


def unpack(packed: torch.Tensor, bits: int, numel: int) -> torch.Tensor:
    """(..., code_bytes) uint8 to (..., numel) uint8 codes."""
    code = torch.zeros(*packed.shape[:-1], numel, dtype=torch.uint8, device=packed.device)
    at = 0
    for width, shift in planes(bits):
        size = -(-numel * width // 8)
        places = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device)
        plane = (packed[..., at : at + size, None] >> places) & ((1 << width) - 1)
        code |= plane.flatten(-2)[..., :numel] << shift
        at += size
    return code
