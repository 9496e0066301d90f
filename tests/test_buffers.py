"""The buffer pool never hands out memory that somebody still sees, and keeps within its bound."""

from __future__ import annotations

import torch

from qsdp.buffers import BufferPool

CPU = torch.device("cpu")


def test_memory_is_reused_once_every_view_is_gone() -> None:
    pool = BufferPool()
    first = pool.take(1000, torch.float32, CPU)
    address, view = first.data_ptr(), first[10:].split(100)[2]
    del first
    second = pool.take(1000, torch.float32, CPU)
    assert second.data_ptr() != address, "a view is left"
    del view
    third = pool.take(1990, torch.bfloat16, CPU)
    assert third.data_ptr() == address and third.shape == (1990,)


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


def test_a_buffer_of_an_inference_serves_training() -> None:
    """Memory taken first under inference mode is written in place later, and saved for backward,
    as tensors of an inference cannot be.
    """
    pool = BufferPool()
    with torch.inference_mode():
        first = pool.take(100, torch.float32, CPU)
        first.fill_(1.0)
        address = first.data_ptr()
        del first
    buffer = pool.take(100, torch.float32, CPU)
    assert buffer.data_ptr() == address and not buffer.is_inference()
    buffer += 1.0
    weight = torch.nn.Parameter(torch.full((100,), 3.0))
    (weight * buffer).sum().backward()
    assert torch.equal(weight.grad, torch.full((100,), 2.0))
    buffer.requires_grad_()
    (weight.detach() * buffer).sum().backward()
    assert torch.equal(buffer.grad, torch.full((100,), 3.0))
