"""Order on accelerators by construction: a recorder in the place of CUDA's streams and events."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from qsdp import streams
from qsdp.comms import QuantizedAllReduce
from qsdp.exchange import Transfers, run
from qsdp.stats import CommMeter

CUDA = torch.device("cuda", 0)


class Event:
    def __init__(self, stream: Stream) -> None:
        self.stream, self.done = stream, False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        raise AssertionError("the host waits")


class Stream:
    """Knows which events of other streams it has waited for."""

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.priority, self.waited, self.waited_streams = priority, [], []

    def record_event(self) -> Event:
        return Event(self)

    def wait_event(self, event: Event) -> None:
        self.waited.append(event)

    def wait_stream(self, stream: Stream) -> None:
        self.waited_streams.append(stream)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """``now`` is the current stream."""
    state = SimpleNamespace(now=Stream())

    @contextmanager
    def stream(other: Stream) -> Iterator[None]:
        before, state.now = state.now, other
        yield
        state.now = before

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: state.now)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(streams, "_beside", {})
    return state


def test_turns_order_streams(cuda: SimpleNamespace) -> None:
    """A use in one stream, then in another: the other waits for the first one's end."""
    turns, one, other = streams.Turns(CUDA), Stream(), Stream()
    cuda.now = one
    with turns:
        pass
    assert not one.waited
    cuda.now = other
    with turns:
        assert [event.stream for event in other.waited] == [one]
    cuda.now = one
    with turns:
        assert [event.stream for event in one.waited] == [other]


def test_turns_on_a_cpu_ask_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", None)
    turns = streams.Turns(torch.device("cpu"))
    for _ in range(2):
        with turns:
            pass


def test_asynchronous_collectives_run_beside(cuda: SimpleNamespace) -> None:
    """All stages in a stream of high priority that has waited for the caller's; tensors are kept
    until somebody has waited, and so is nothing else.
    """
    seen: list[Stream] = []
    caller = cuda.now

    def stages(inner: torch.Tensor) -> Iterator[Transfers]:
        seen.append(cuda.now)
        yield ()
        seen.append(cuda.now)
        inner.add_(1)

    tensor, wire = torch.zeros(3), torch.zeros(3)
    alive, wire_alive = weakref.ref(tensor), weakref.ref(wire)
    work = run(stages(wire), True, CommMeter(), CUDA, (tensor,))
    assert work is not None
    del tensor, wire
    gc.collect()
    assert len(seen) == 2 and seen[0] is seen[1] is not caller
    assert seen[0].priority < 0 and seen[0].waited_streams == [caller]
    assert alive() is not None, "its memory would be given to others"
    assert wire_alive() is None, "what is done needs no wire"
    assert cuda.now is caller and not caller.waited
    assert not work.is_completed()
    work.wait()
    assert [event.stream for event in caller.waited] == [seen[0]]
    assert alive() is None


def test_synchronous_collectives_run_where_they_are_called(cuda: SimpleNamespace) -> None:
    seen: list[Stream] = []

    def stages() -> Iterator[Transfers]:
        seen.append(cuda.now)
        yield ()

    assert run(stages(), False, CommMeter(), CUDA, ()) is None
    assert seen == [cuda.now]


def test_what_replicas_reduce_is_held_for_the_stream_that_reduces_it(
    cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP2 has made it in another stream, and drops its last reference when it likes."""
    recorded: list[Stream] = []
    buffer = SimpleNamespace(device=CUDA, record_stream=recorded.append)
    monkeypatch.setattr("qsdp.comms.run", lambda *args: None)
    monkeypatch.setattr(QuantizedAllReduce, "_reduce", lambda self, values: iter(()))
    hook = object.__new__(QuantizedAllReduce)
    hook._way = SimpleNamespace(size=2)  # type: ignore[assignment]
    hook.meter = CommMeter()
    hook(buffer)  # type: ignore[arg-type]
    assert recorded == [cuda.now]


def test_statistics_never_wait(cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the device has not reached is counted by a later call."""
    made: list[Event] = []

    def event(enable_timing: bool = False) -> Event:
        made.append(Event(cuda.now))
        made[-1].record = lambda: None  # type: ignore[attr-defined]
        made[-1].elapsed_time = lambda end: 250.0  # type: ignore[attr-defined]
        return made[-1]

    monkeypatch.setattr(torch.cuda, "Event", event)
    meter = CommMeter()
    with meter.phase("encode", CUDA):
        pass
    assert not made, "times that nobody has asked for"
    meter.timing = True
    for _ in range(2):
        with meter.phase("encode", CUDA):
            pass
    assert meter.seconds("encode") == 0.0
    made[1].done = True
    assert meter.seconds("encode") == 0.25
    made[3].done = True
    assert meter.read("all_gather").encode_s == 0.5
