"""The buffer pool never hands out memory that somebody still sees, and keeps within its bound."""

from __future__ import annotations

import torch

from qsdp.buffers import BufferPool
from qsdp.units import subsequences_of_size
from qsdp.wire import Segment

CPU = torch.device("cpu")


def test_memory_is_reused_once_every_view_is_gone() -> None:
    pool = BufferPool()
    first = pool.take(1000, torch.float32, CPU)
    address, view = first.data_ptr(), first[10:].split(100)[2]
    del first
    second = pool.take(1000, torch.float32, CPU)
    assert second.data_ptr() != address, "a view is left"
    del view
    third = pool.take(1900, torch.bfloat16, CPU)
    assert third.data_ptr() == address and third.shape == (1900,)


def test_a_gradient_keeps_its_buffer() -> None:
    """FSDP2 makes gradients as strided views of what allocate returned."""
    pool = BufferPool()
    param = torch.nn.Parameter(torch.zeros(10, 10))
    param.grad = torch.as_strided(pool.take(200, torch.float32, CPU), (10, 10), (10, 1), 50)
    address = param.grad.untyped_storage().data_ptr()
    assert pool.take(200, torch.float32, CPU).data_ptr() != address
    param.grad = None
    assert pool.take(200, torch.float32, CPU).data_ptr() == address


def test_the_bound_holds() -> None:
    pool = BufferPool(max_bytes=1000)
    held = [pool.take(300, torch.uint8, CPU) for _ in range(5)]
    assert len({t.data_ptr() for t in held}) == 5
    assert pool.kept_bytes <= 1000
    del held
    assert pool.take(900, torch.uint8, CPU).shape == (900,)
    assert pool.kept_bytes <= 1000
    assert pool.take(2000, torch.uint8, CPU).shape == (2000,)
    assert pool.take(0, torch.uint8, CPU).shape == (0,)


def test_subsequences_of_size() -> None:
    """Which parameters got gradients: all, a unique choice, or several that look alike or not."""
    a, b, raw = Segment(4, 8), Segment(6, 8), Segment(4)
    assert subsequences_of_size((a, b, raw), 14) == [(a, b, raw)]
    assert subsequences_of_size((a, b), 6) == [(b,)]
    assert subsequences_of_size((a, a, b), 10) == [(a, b)], "either a: the same on the wire"
    assert len(subsequences_of_size((a, b, raw), 4)) == 2
    assert subsequences_of_size((a, b), 5) == []
    many = tuple(Segment(2**i, 8) for i in range(16)) * 2
    assert len(subsequences_of_size(many, 12345)) == 2, "bounded work"
