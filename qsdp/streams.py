"""Order on accelerators: memory that outlives a call, and collectives beside the computation.

On CPUs everything here does nothing: calls run one after another anyway.
"""

from __future__ import annotations

from types import TracebackType

import torch
import torch.distributed as dist

_HIGH_PRIORITY = -1
_beside: dict[torch.device, torch.cuda.Stream] = {}


class Turns:
    """Uses of memory that outlives a call, one after another whatever the stream of each.

    FSDP2 gathers in a stream of its own while it trains and in the current one otherwise (a first
    ``unshard()``, asynchronous gathers), and states are saved and loaded in the current one. Inside
    ``with turns:`` the current stream has waited for the use before.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._last: torch.cuda.Event | None = None

    def __enter__(self) -> None:
        if self._last is not None:
            torch.cuda.current_stream().wait_event(self._last)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._on_cuda:
            self._last = torch.cuda.current_stream().record_event()


class Beside(dist.Work):
    """A collective that runs in a stream of its own; waiting for it is a matter of streams.

    The host never waits. Made inside ``with beside(device):``, after everything was launched.

    Args:
        kept: tensors of the caller's stream that the other stream works on; kept until a stream
            has waited, so that their memory is not given to others before.
    """

    def __init__(self, kept: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self.stream = torch.cuda.current_stream()
        self._event = self.stream.record_event()
        self._kept = kept

    def wait(self, timeout: object = None) -> bool:
        """Let the current stream wait."""
        torch.cuda.current_stream().wait_event(self._event)
        self._kept = ()
        return True

    def is_completed(self) -> bool:
        """Whether the device has done it."""
        done: bool = self._event.query()
        return done


def beside(device: torch.device) -> torch.cuda.Stream:
    """The stream for collectives beside the computation, which has waited for the current one.

    Of high priority, as NCCL's: what waits for the network should not wait for a free place too.
    """
    stream = _beside.get(device)
    if stream is None:
        stream = _beside[device] = torch.cuda.Stream(device, priority=_HIGH_PRIORITY)
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


def hold(tensor: torch.Tensor) -> None:
    """Tell the allocator that the current stream works on a tensor that another one made.

    Its memory is not handed out again before this stream is through, whoever drops it when.
    """
    if tensor.device.type == "cuda":
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
