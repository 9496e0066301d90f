"""What a user would take in place of qsdp, as far as it is installed: encode and decode of each.

A peer that cannot be imported is left out. Where an interface allows it, outputs are reused; the
others allocate, which :mod:`qsdp.bench.kernels` makes as cheap as it gets.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from qsdp.kernels import reference
from qsdp.kernels.packing import pack, unpack
from qsdp.wire import Segment

BLOCK_SIZE = 1024


class Peer(NamedTuple):
    """One way to quantize ``values``: callables without arguments, ready to be timed."""

    name: str
    bits: int
    encode: Callable[[], object]
    decode: Callable[[], object]


def peers(values: torch.Tensor, bits: int, *, compiled: bool) -> Iterator[Peer]:
    """The peers that quantize float32 ``values`` to ``bits`` bits on their device.

    Args:
        values: (numel,), a multiple of ``BLOCK_SIZE``.
        compiled: include torch.compile of the reference (minutes of compilation).
    """
    makers: list[Callable[[torch.Tensor], Peer]] = []
    on_cpu = values.device.type == "cpu"
    if bits == 8:
        makers += [_bitsandbytes, _torchao, _ddp_hook]
        makers += [_fbgemm_byte, _hivemind] if on_cpu else []
    if bits == 4 and on_cpu:
        makers += [_fbgemm_4bit]
    for make in makers:
        try:
            yield make(values)
        except (ImportError, AttributeError, NotImplementedError):
            continue
    if compiled:
        yield _compiled_reference(values, bits)


def bfloat16_cast(values: torch.Tensor) -> Peer:
    """Not quantization, but what sends half the bytes with no further ado."""
    half = torch.empty_like(values, dtype=torch.bfloat16)
    back = torch.empty_like(values)
    return Peer("cast to bfloat16", 16, lambda: half.copy_(values), lambda: back.copy_(half))


def fbgemm_sum(rows: torch.Tensor, bits: int) -> Callable[[], object] | None:
    """Unpack every row with fbgemm and add: what decode_sum replaces. For 8 and 4 bits, on CPU.

    Args:
        rows: (num_rows, numel) float32.
    """
    if rows.device.type != "cpu" or bits not in (4, 8):
        return None
    make = _fbgemm_byte if bits == 8 else _fbgemm_4bit
    unpacks = [make(row).decode for row in rows]

    def unpack_and_add() -> object:
        total: Any = unpacks[0]()
        for one in unpacks[1:]:
            total += one()
        return total

    return unpack_and_add


def _fbgemm_byte(values: torch.Tensor) -> Peer:
    ops = torch.ops.quantized
    table = values.view(-1, BLOCK_SIZE)
    packed = ops.embedding_bag_byte_prepack(table)
    return Peer(
        "fbgemm",
        8,
        lambda: ops.embedding_bag_byte_prepack(table),
        lambda: ops.embedding_bag_byte_unpack(packed),
    )


def _fbgemm_4bit(values: torch.Tensor) -> Peer:
    ops = torch.ops.quantized
    table = values.view(-1, BLOCK_SIZE)
    packed = ops.embedding_bag_4bit_prepack(table)
    return Peer(
        "fbgemm",
        4,
        lambda: ops.embedding_bag_4bit_prepack(table),
        lambda: ops.embedding_bag_4bit_unpack(packed),
    )


def _bitsandbytes(values: torch.Tensor) -> Peer:
    functional = importlib.import_module("bitsandbytes.functional")
    codes, state = functional.quantize_blockwise(values, blocksize=BLOCK_SIZE)
    # On CPU it knows no output to write to.
    out = None if values.device.type == "cpu" else torch.empty_like(values)
    return Peer(
        "bitsandbytes",
        8,
        lambda: functional.quantize_blockwise(values, blocksize=BLOCK_SIZE),
        lambda: functional.dequantize_blockwise(codes, state, out=out),
    )


def _torchao(values: torch.Tensor) -> Peer:
    ao = importlib.import_module("torchao.quantization.quant_primitives")
    table, block = values.view(-1, BLOCK_SIZE), (1, BLOCK_SIZE)

    def encode() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scale, zero = ao.choose_qparams_affine(
            table, ao.MappingType.ASYMMETRIC, block, torch.uint8, 0, 255
        )
        return ao.quantize_affine(table, block, scale, zero, torch.uint8, 0, 255), scale, zero

    codes, scale, zero = encode()
    return Peer(
        "torchao",
        8,
        encode,
        lambda: ao.dequantize_affine(codes, block, scale, zero, torch.uint8, 0, 255),
    )


def _hivemind(values: torch.Tensor) -> Peer:
    compression = importlib.import_module("hivemind.compression")
    method = importlib.import_module("hivemind.proto.runtime_pb2").UNIFORM_8BIT
    message = compression.serialize_torch_tensor(values, method)
    return Peer(
        "hivemind",
        8,
        lambda: compression.serialize_torch_tensor(values, method),
        lambda: compression.deserialize_torch_tensor(message),
    )


def _ddp_hook(values: torch.Tensor) -> Peer:
    """The arithmetic of `quantization_pertensor_hook`, without its all-gather."""
    name = "torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks"
    hooks: Any = importlib.import_module(name)
    quantize, dequantize = (
        hooks._quantize_per_tensor_backend,
        hooks._dequantize_per_tensor_backend,
    )
    observers = importlib.import_module("torch.ao.quantization")

    def encode() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        observer = observers.MinMaxObserver().to(values.device)
        observer(values)
        scale, zero = (word.to(values.device) for word in observer.calculate_qparams())
        return quantize(values, scale, zero), scale, zero

    codes, scale, zero = encode()
    return Peer("DDP hook", 8, encode, lambda: dequantize(codes, scale, zero))


def _compiled_reference(values: torch.Tensor, bits: int) -> Peer:
    segment = Segment(values.numel(), bits, BLOCK_SIZE)
    blocks = values.view(1, -1, BLOCK_SIZE)

    @torch.compile
    def encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scale, offset, code = reference.quantize_blocks(x, segment, 0, 0, 0, 0)
        return scale, offset, pack(code, bits)

    @torch.compile
    def decode(scale: torch.Tensor, offset: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        code = unpack(packed, bits, BLOCK_SIZE)
        return reference.dequantize_blocks(scale, offset, code, segment)

    encoded = encode(blocks)
    return Peer("torch.compile", bits, lambda: encode(blocks), lambda: decode(*encoded))
