"""ReplicaSync: replicas take steps of their own and average their weights now and then.

A replica is one FSDP2 group, one DDP group or one rank; replicas know nothing of each other but
here. The averages travel through qsdp's own all-reduce (:func:`qsdp.stages.all_reduce_stages`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from qsdp.exchange import Pending
from qsdp.kernels.philox import derive_key
from qsdp.local.check import check_arguments, facts_of
from qsdp.local.config import SyncConfig
from qsdp.local.flight import Flight
from qsdp.local.handover import hand_over
from qsdp.local.meeting import Meeting
from qsdp.local.parts import Part, divide, float_buffers, trained_parameters
from qsdp.local.peers import Peers
from qsdp.local.schedule import Round
from qsdp.local.state import SyncMemory
from qsdp.stats import CommStats

_LOCAL = 4  # for keys, beside those of unit.py and ddp.py
_ATTEMPTS = 3  # at one step, where replicas are lost again and again


class ReplicaSync:
    """Keeps replicas together that take their optimizer steps alone.

    ::

        sync = qsdp.ReplicaSync(model, optimizer, mesh["replicate"].get_group(),
                                qsdp.SyncConfig(qsdp.SyncSchedule(base=4)), total_steps=1400)
        ...
        optimizer.step(); scheduler.step(); sync.step()

    Make it on every rank, once the model is sharded and its weights are loaded: a collective call
    of ``group``, as every other one here is. All replicas must start from the same weights, and
    take equally many steps. Optimizer states stay each replica's own. What qsdp does inside a
    replica is its own business, and sees a synchronisation as a change of weights.

    Where a replica is lost, a synchronisation raises RuntimeError within the group's timeout; steps
    and weights are then those of before. With a :class:`Meeting` in place of ``group`` the others
    go on without it, and one that comes late, returns or joins takes over what they have in common:
    read :attr:`steps` to see where. Its optimizer starts as it was made.

    Args:
        model: whose trained parameters are synchronised, and its floating-point buffers.
        optimizer: whose learning rate the schedule follows, the largest of its groups.
        group: the ranks that hold this rank's part of the model, one of each replica; or a Meeting,
            where replicas are one rank each.
        config: equal on all ranks.
        total_steps: of the training. The last step always ends with a synchronisation of the whole
            model, with nothing left under way. None if the end is not known: call :meth:`finish`.
        lr: the learning rate of step 0, 1, ...; None reads the optimizer's when a round begins,
            which is right where the scheduler has stepped before :meth:`step` is called.
        steps: that were taken before, where a training goes over to local steps.

    Attributes:
        steps: that were taken.
        round: that is under way.

    Raises:
        TypeError, ValueError: arguments that do not fit, or that differ between replicas; on every
            rank.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        group: dist.ProcessGroup | Meeting,
        config: SyncConfig,
        *,
        total_steps: int | None = None,
        lr: Callable[[int], float] | None = None,
        steps: int = 0,
    ) -> None:
        check_arguments(model, optimizer, config, total_steps, lr, steps)
        entries = trained_parameters(model)
        self.config, self.total_steps = config, total_steps
        self._model, self._optimizer, self._lr = model, optimizer, lr
        self._meeting = group if isinstance(group, Meeting) else None
        self._reshard()
        found = group.meet() if isinstance(group, Meeting) else group
        key = derive_key(config.seed, _LOCAL)
        self._peers = Peers(found, entries[0].local.device, key, config.verify)
        joins = self._meeting is not None and self._meeting.number > 1
        alone = self._meeting is not None
        facts, error = facts_of(
            model, entries, config, total_steps, found, alike=not joins, alone=alone
        )
        if not joins:
            self._peers.agree(facts, error)
        elif error is not None:
            raise ValueError(error)
        parts = [Part(run, config) for run in divide(entries, config.fragments)]
        buffers = float_buffers(model) if config.buffers else []
        self._memory = SyncMemory(
            parts, Part(buffers, None) if buffers else None, config, self.num_replicas
        )
        # What must be alike on all replicas whatever they have trained.
        self._facts = {name: fact for name, fact in facts.items() if name != "weights at the start"}
        self.steps = steps
        self.round = Round(0, steps, self._interval(steps))
        if joins:
            self._take_over(joins=True)

    @property
    def num_replicas(self) -> int:
        """That take part now."""
        return self._peers.size

    @property
    def common(self) -> bool:
        """Whether all replicas hold the same weights now: no step since the whole was averaged."""
        first = self.round == (0, self.steps, self.round.interval)
        whole = first or self.steps == self.total_steps or len(self._memory.parts) == 1
        return whole and self.steps == self.round.first and not self._memory.flights

    def due(self, step: int) -> bool:
        """Whether :meth:`step` exchanges anything when it is called for the ``step``-th time.

        Of the round under way, and of its end at the latest.
        """
        return step == self.total_steps or bool(self._due(step))

    def step(self) -> bool:
        """After each optimizer step: synchronise what is due.

        1. Take up averages that have arrived (``overlap_steps``).
        2. Compare step and interval with the other replicas, and send the parts that are due.
        3. Without overlap wait for their average, take the outer step, and set the weights.
        4. At the end of a round average the buffers too, and fix the next round's length.

        Between synchronisations it moves nothing and waits for nobody.

        Returns:
            Whether this rank's weights are others now than the optimizer left them.

        Raises:
            ValueError: more steps than ``total_steps``, or replicas that are not at the same step.
            RuntimeError: another replica is late or gone, and there is no Meeting.
        """
        step = self.steps + 1
        if self.total_steps is not None and step > self.total_steps:
            raise ValueError(
                f"ReplicaSync.step was called {step} times and total_steps is {self.total_steps}: "
                "give ReplicaSync(total_steps=...) the steps of the whole training"
            )
        changed = False
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                changed |= self._take(step)
                return changed
            except RuntimeError as error:
                if self._meeting is None or attempt == _ATTEMPTS:
                    raise self._lost(step, error) from error
                changed |= self._go_on_without(step, error)
            if self.steps >= step:
                break
        return changed

    def finish(self) -> None:
        """Synchronise the whole model now, whatever the schedule says; a new round begins.

        For a training that ends early, or whose end was not known. On all replicas after the same
        step; does nothing where they have the same weights anyway.

        Raises:
            RuntimeError: another replica is gone.
        """
        try:
            self._peers.agree({"step": self.steps, "finish": True})
            if self.common:
                return
            self._land(self.steps, everything=True)
            self._synchronise(self._memory.all_parts)
        except RuntimeError as error:
            raise self._lost(self.steps, error) from error
        self._begin()

    @contextmanager
    def average(self) -> Iterator[None]:
        """Inside the model holds the mean of all replicas' weights and buffers, for an evaluation.

        Afterwards every replica has its own again, bit for bit. Moves the model in full precision,
        twice its share of a synchronisation in float32; nothing where replicas are :attr:`common`.
        """
        if self.common:
            yield
            return
        self._reshard()
        parts = self._memory.all_parts
        own = [part.values() for part in parts]
        for part, values in zip(parts, own, strict=True):
            part.write(self._peers.mean(values.clone()))
        try:
            yield
        finally:
            self._reshard()
            for part, values in zip(parts, own, strict=True):
                part.write(values)

    def average_of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The mean over replicas of tensors that differ between them, such as a state of the model.

        In float32, in the order of the replicas: equal on all of them. Integers are taken from this
        replica. For checkpoints: torch.distributed.checkpoint mixes replicas that differ.

        Args:
            tensors: with the same names and shapes on all replicas; DTensors stay DTensors.
        """
        return {name: self._peers.mean_of(tensor) for name, tensor in tensors.items()}

    def stats(self, reset: bool = False) -> CommStats:
        """What this rank sent to other replicas, as :attr:`CommStats.all_reduce_sent`.

        ``stock_all_reduce`` is what the same synchronisations would have sent in float32.
        """
        stats = self._peers.meter.read("all_reduce")
        if reset:
            self._peers.meter.reset()
        return stats

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What a resumed run needs beside each replica's own weights and optimizer, as copies.

        May be taken in the middle of a round, and of an overlapped transfer, which it waits for.
        Anchor and momentum are the same on all replicas and are DTensors where parameters are;
        names of what is a rank's own end with ``.rankR``. Sizes are those of a fresh state.
        """
        return self._memory.state([self.steps, *self.round])

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from what :meth:`state_dict` gave on this rank; a collective call.

        With as many ranks and replicas as before the run goes on bit for bit, once each replica has
        its own weights and optimizer back. On others load the average of all weights; rounds,
        anchor and momentum go on, residuals start from zero, and averages that were under way are
        dropped, with a warning.

        Raises:
            ValueError: a state of another model or configuration; on every rank.
        """
        error, same = None, False
        try:
            same = self._memory.check(state)
        except ValueError as raised:
            error = str(raised)
        progress = state["progress"].tolist() if "progress" in state else []
        self._peers.agree({"progress of the synchronisation": progress}, error)
        self.steps, self.round = progress[1], Round(*progress[2:5])
        self._memory.load(state, same)

    def _interval(self, step: int) -> int:
        if self._lr is not None:
            lr = self._lr(step)
        else:
            lr = max(float(group["lr"]) for group in self._optimizer.param_groups)
        if step == self.total_steps:
            return 1  # of a round that will not begin
        return self.config.schedule.interval(step, lr, self.total_steps)

    def _begin(self) -> None:
        self.round = Round(self.round.number + 1, self.steps, self._interval(self.steps))

    def _due(self, step: int) -> list[Part]:
        """Parts whose turn it is when ``step`` steps were taken: evenly over the round."""
        parts, interval = self._memory.parts, self.round.interval
        return [
            part
            for number, part in enumerate(parts, 1)
            if step == self.round.first - (-number * interval // len(parts))
        ]

    def _take(self, step: int) -> bool:
        """:meth:`step`, as long as no replica is lost; whether weights changed."""
        last = step == self.total_steps
        parts = self._memory.parts if last else self._due(step)
        landed = self._land(step, everything=last)
        launch = bool(self.config.overlap_steps) and not last
        waiting = False
        if parts:
            self._peers.agree({"step": step, "interval": self.round.interval})
            if self._meeting is not None:  # one that waits is seen by some, and told to all
                seen = torch.tensor([float(self._meeting.somebody_waits())])
                waiting = bool(self._peers.mean(seen) > 0)
            if launch:
                self._launch(parts, step)
            else:
                buffers = self._memory.buffers if step == self.round.end or last else None
                self._synchronise([*parts, *([buffers] if buffers is not None else [])])
            if launch and step == self.round.end and self._memory.buffers is not None:
                self._synchronise([self._memory.buffers])
        self.steps = step
        if step == self.round.end:
            self._begin()
        if waiting and not last:
            self._meet()
        return landed or (bool(parts) and not launch)

    def _launch(self, parts: Sequence[Part], step: int) -> None:
        self._reshard()
        for part in parts:
            for flight in [f for f in self._memory.flights if f.part is part]:
                self._take_up(flight)  # a short round: the one before is still under way
            start = part.values()
            flat = part.moved(start).clone()
            residuals = self._memory.residuals(part)
            work = self._peers.average(flat, part.layout, residuals, async_op=True)
            arrives = step + self.config.overlap_steps
            self._memory.flights.append(Flight(part, start, flat, step, arrives, work))

    def _land(self, step: int, everything: bool) -> bool:
        """Take up what is to be taken up at this step, in the order of its sending."""
        landed = False
        for flight in list(self._memory.flights):
            if everything or step >= flight.arrives:
                self._reshard()
                self._take_up(flight)
                landed = True
            elif step >= flight.half_way and isinstance(flight.work, Pending):
                flight.advance()
        return landed

    def _take_up(self, flight: Flight) -> None:
        """Set the weights to the average, and to what this replica did since it was sent."""
        flight.wait()
        own = flight.part.values() - flight.start
        flight.part.write(flight.part.arrive(flight.average) + own)
        self._memory.flights.remove(flight)

    def _synchronise(self, parts: Sequence[Part]) -> None:
        """Average parts and set the weights; nothing is set where a replica is lost meanwhile."""
        self._reshard()
        averages = []
        for part in parts:
            flat = part.moved(part.values())
            self._peers.average(flat, part.layout, self._memory.residuals(part))
            averages.append(flat)
        for part, average in zip(parts, averages, strict=True):
            part.write(part.arrive(average))

    def _lost(self, step: int, error: RuntimeError) -> RuntimeError:
        return RuntimeError(
            f"ReplicaSync: the synchronisation at step {step} failed, another replica is late or "
            f"gone ({_line(error)}): resume all of them, or give a Meeting to go on without it"
        )

    def _go_on_without(self, step: int, error: RuntimeError) -> bool:
        before = self.num_replicas
        changed = self._meet()
        warnings.warn(
            f"qsdp: the synchronisation at step {step} failed ({_line(error)}); going on with "
            f"{self.num_replicas} of {before} replicas",
            stacklevel=3,
        )
        return changed

    def _meet(self) -> bool:
        """Form the next group, and give those who are behind what the others have in common."""
        assert self._meeting is not None
        self._peers.use(self._meeting.meet())
        return self._take_over(joins=False)

    def _take_over(self, joins: bool) -> bool:
        """Whether this rank's weights are now what all had in common last; all ranks call it."""
        self._reshard()
        self._peers.agree(self._facts)
        progress = [-1] * 4 if joins else [self.steps, *self.round]
        found = hand_over(self._memory, self._peers, progress)
        self.steps, self.round = found[0], Round(*found[1:])
        return found != progress

    def _reshard(self) -> None:
        """An evaluation leaves FSDP2's root unsharded, and what it gathered would be used again."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def __getstate__(self) -> Any:
        raise TypeError(
            "a ReplicaSync cannot be pickled, because it holds a process group: save its "
            "state_dict(), and give that to load_state_dict() of a new one"
        )


def _line(error: RuntimeError) -> str:
    """What backends say may be a page long."""
    return str(error).partition("\n")[0]
