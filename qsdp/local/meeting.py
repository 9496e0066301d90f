"""Meeting: where replicas that come and go find each other, through a store that outlives them."""

from __future__ import annotations

import math
import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

_POLL_S = 0.05


class Meeting:
    """A place where one-rank replicas form a group, and form another when one is lost or joins.

    Each replica is a job of its own, without a default process group: the meeting makes it, gloo on
    CPUs, and makes another at every change of its members. The group's timeout is how late a
    replica may be. One that is later goes on as one that joins.

    Groups are numbered. For each the store counts those who want in. The first group is complete
    with ``replicas`` members. A later one is closed by the first of the members before it to
    arrive: once all of these are there, or ``timeout`` after its own arrival. Who comes later waits
    for the next group, which is formed at the next synchronisation.

    Args:
        store: that all replicas reach and that outlives any of them, such as a TCPStore in a
            process of its own, or a FileStore on a file system that all see.
        replicas: of the first group.
        timeout: seconds that others wait for a late replica, at least as long as replicas may be
            apart at a synchronisation and as the synchronisation takes.
        join_timeout: seconds that a replica which joins waits for the next synchronisation.

    Raises:
        ValueError: an argument out of range, or a default process group that is there already.
    """

    def __init__(
        self,
        store: Store,
        replicas: int,
        *,
        timeout: float = 60.0,
        join_timeout: float = 3600.0,
    ) -> None:
        if not isinstance(store, Store):
            raise TypeError(f"Meeting takes a torch.distributed store, got {store!r}")
        if not isinstance(replicas, int) or isinstance(replicas, bool) or replicas < 1:
            raise ValueError(
                f"Meeting(replicas=...) must be an integer of at least 1, got {replicas!r}"
            )
        for name, value in (("timeout", timeout), ("join_timeout", join_timeout)):
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 < value < math.inf:
                raise ValueError(
                    f"Meeting({name}=...) must be a finite number of seconds above 0, got {value!r}"
                )
        if dist.is_initialized():
            raise ValueError(
                "Meeting makes the default process group itself, and there is one already: leave "
                "init_process_group out, and start every replica as a job of its own"
            )
        self.timeout, self.join_timeout = timeout, join_timeout
        self._store, self._replicas = store, replicas
        self._members = 0  # of the group that this replica is in; 0 while it is in none
        self._number = 0

    @property
    def number(self) -> int:
        """Of the group under way: 1, 2, ...; 0 before the first."""
        return self._number

    def meet(self) -> dist.ProcessGroup:
        """Form the next group and return it; the one before is destroyed.

        Raises:
            RuntimeError: no group within ``join_timeout``.
        """
        if dist.is_initialized():
            dist.destroy_process_group()
        member = self._members > 0
        end = time.monotonic() + self.join_timeout
        while True:
            number = self._number + 1 if member else self._closed() + 1
            place = self._store.add(f"{number}/wants in", 1)
            if number == 1:
                self._wait_for_all(end)
                size = self._replicas
            else:
                if member and self._store.add(f"{number}/known", 1) == 1:
                    self._close(number)
                size = self._wait_until_closed(number, end)
            self._number, member = number, False
            if place <= size:
                break
        self._members = size
        dist.init_process_group(
            "gloo",
            store=PrefixStore(f"{number}/group", self._store),
            rank=place - 1,
            world_size=size,
            timeout=timedelta(seconds=self.timeout),
        )
        group = dist.group.WORLD
        assert group is not None
        return group

    def somebody_waits(self) -> bool:
        """Whether a replica wants to join. Replicas may see it at different times."""
        return bool(self._store.add(f"{self._number + 1}/wants in", 0) > 0)

    def _closed(self) -> int:
        """Groups that are closed; the first is not counted before it is complete."""
        return max(
            int(self._store.add("closed", 0)),
            int(self._store.add("1/wants in", 0) >= self._replicas),
        )

    def _close(self, number: int) -> None:
        end = time.monotonic() + self.timeout
        while self._store.add(f"{number}/known", 0) < self._members and time.monotonic() < end:
            time.sleep(_POLL_S)
        size = self._store.add(f"{number}/wants in", 0)
        self._store.add("closed", number - self._store.add("closed", 0))
        self._store.set(f"{number}/size", str(size))

    def _wait_for_all(self, end: float) -> None:
        while self._store.add("1/wants in", 0) < self._replicas:
            self._require_time(end, f"Meeting(replicas={self._replicas})")
            time.sleep(_POLL_S)

    def _wait_until_closed(self, number: int, end: float) -> int:
        while not self._store.check([f"{number}/size"]):
            self._require_time(end, "the replicas that train")
            time.sleep(_POLL_S)
        return int(self._store.get(f"{number}/size"))

    def _require_time(self, end: float, whom: str) -> None:
        if time.monotonic() > end:
            raise RuntimeError(
                f"Meeting: no group with {whom} within join_timeout={self.join_timeout} s: see "
                "whether they still run, or raise Meeting(join_timeout=...)"
            )
