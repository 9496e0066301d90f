"""What a user would take in place of qsdp, as far as it is installed: encode and decode of each.

A peer that cannot be imported is left out. Where an interface allows it, outputs are reused; the
others allocate, which the command makes as cheap as it gets.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from qsdp.bench.measure import BLOCK_SIZE, SUM_ROWS, Candidate, Case, Peers, Settings
from qsdp.kernels import reference
from qsdp.quantizer import Quantizer


class Peer(NamedTuple):
    """One way to quantize ``values``: callables without arguments, ready to be timed."""

    name: str
    bits: int
    encode: Callable[[], object]
    decode: Callable[[], object]


def candidates(settings: Settings, *, compiled: bool) -> Peers:
    """What to time beside our kernels on ``settings``; all peers take float32.

    Args:
        compiled: include torch.compile of the reference (minutes of compilation).
    """

    def of(case: Case) -> Iterator[Candidate]:
        if case.values.dtype != torch.float32 or case.op not in ("encode", "decode", "decode_sum"):
            return
        if case.op == "decode_sum":
            yield from _fbgemm_sum(case)
            return
        found = list(installed(case.values, case.bits))
        if compiled:
            found.append(_compiled_reference(case.values, case.bits))
        if case.bits == max(settings.bits):
            found.append(_bfloat16_cast(case.values))
        for peer in found:
            run = peer.encode if case.op == "encode" else peer.decode
            moved = case.values.nbytes + case.values.numel() * peer.bits // 8
            yield Candidate("nearest", peer.bits, run, moved, peer.name)

    return of


def installed(values: torch.Tensor, bits: int) -> Iterator[Peer]:
    """The peers that quantize float32 ``values`` to ``bits`` bits on their device.

    Args:
        values: (numel,), a multiple of ``BLOCK_SIZE``.
    """
    makers: list[Callable[[torch.Tensor], Peer]] = []
    on_cpu = values.device.type == "cpu"
    if bits == 8:
        makers += [_bitsandbytes, _torchao, _ddp_hook]
        makers += [_hivemind] if on_cpu else []
    if bits in (4, 8) and on_cpu:
        makers += [partial(_fbgemm, bits=bits)]
    for make in makers:
        try:
            yield make(values)
        except (ImportError, AttributeError, NotImplementedError):
            continue


def _bfloat16_cast(values: torch.Tensor) -> Peer:
    """Not quantization, but what sends half the bytes with no further ado."""
    half = torch.empty_like(values, dtype=torch.bfloat16)
    back = torch.empty_like(values)
    return Peer("cast to bfloat16", 16, lambda: half.copy_(values), lambda: back.copy_(half))


def _fbgemm_sum(case: Case) -> Iterator[Candidate]:
    """Unpack every row with fbgemm and add: what decode_sum replaces. For 8 and 4 bits, on CPU."""
    rows = case.values.view(SUM_ROWS, -1)
    if rows.device.type != "cpu" or case.bits not in (4, 8):
        return
    unpacks = [_fbgemm(row, case.bits).decode for row in rows]

    def unpack_and_add() -> object:
        total: Any = unpacks[0]()
        for one in unpacks[1:]:
            total += one()
        return total

    moved = rows[0].nbytes + rows.numel() * case.bits // 8
    yield Candidate("nearest", case.bits, unpack_and_add, moved, "fbgemm")


def _fbgemm(values: torch.Tensor, bits: int) -> Peer:
    stem = f"embedding_bag_{'byte' if bits == 8 else '4bit'}"
    prepack, unpack = (
        getattr(torch.ops.quantized, f"{stem}_{way}") for way in ("prepack", "unpack")
    )
    table = values.view(-1, BLOCK_SIZE)
    packed = prepack(table)
    return Peer("fbgemm", bits, lambda: prepack(table), lambda: unpack(packed))


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
    quantizer = Quantizer(bits, BLOCK_SIZE, "nearest")
    blocks = values.view(1, -1, BLOCK_SIZE)

    @torch.compile
    def encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scale, offset, code = blocks.quantize_blocks(x, quantizer, 0, 0, 0, 0)
        return scale, offset, reference.pack(code, bits)

    @torch.compile
    def decode(scale: torch.Tensor, offset: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        code = reference.unpack(packed, bits, BLOCK_SIZE)
        return blocks.dequantize_blocks(scale, offset, code, quantizer)

    encoded = encode(blocks)
    return Peer("torch.compile", bits, lambda: encode(blocks), lambda: decode(*encoded))
