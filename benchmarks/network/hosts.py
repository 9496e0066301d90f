"""Several hosts on one machine: network namespaces joined by a bridge, each behind a slow link.

Every host is a namespace with one interface, a veth pair to a switch, which is a namespace with a
bridge; the machine's own network is not touched. A token bucket (`tc ... tbf`) at both ends of each
pair limits what a host sends and what it receives. Frames are 9000 bytes, as between cloud nodes.

Names carry the id of the process that made them, so that what a killed one left behind is found.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

MTU = 9000
INTERFACE = "eth0"
_PREFIX = "qsdp"
_SBIN = "/usr/sbin:/sbin"
_QUEUE_BYTES = 16 << 20
_BURST_S = 0.25e-3
_MIN_BURST = 2 * MTU
_GRACE_S = 3.0
# Loss-based, as most systems have it; the first that the kernel lets a namespace choose. BBR, where
# it is the default, leaves 3 to 5 % of a shaped link unused.
_CONGESTION_CONTROL = ("cubic", "reno")


class Hosts:
    """A context manager: hosts that exist inside it, without limits at first.

    Leaving it, for whatever reason, ends every process in them and removes them. ``SIGTERM`` and
    ``SIGHUP`` to the process leave it too, as Ctrl-C does.

    Raises:
        RuntimeError: this is not Linux as root with iproute2, or the kernel refuses.
    """

    def __init__(self, num_hosts: int) -> None:
        self.num_hosts = num_hosts
        self._stem = f"{_PREFIX}-{os.getpid()}"
        self._switch = f"{self._stem}-switch"

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def name(self, host: int) -> str:
        """The host's namespace."""
        return f"{self._stem}-{host}"

    def inside(self, host: int, command: list[str]) -> list[str]:
        """``command``, to be run on ``host``."""
        return [_tool("ip") or "ip", "netns", "exec", self.name(host), *command]

    def __enter__(self) -> Hosts:
        require_privileges()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _interrupt)
        _remove_abandoned()
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()

    def limit(self, gbps: float | None) -> None:
        """Limit what every host sends and what it receives, each to ``gbps``; None lifts it."""
        for host in range(self.num_hosts):
            for namespace, device in ((self.name(host), INTERFACE), (self._switch, f"port{host}")):
                if gbps is None:
                    _tc(namespace, "replace", device, "pfifo", "limit", "10000")
                    continue
                rate = round(gbps * 1e9)
                # Tokens for one wake-up of the kernel's timer, and for one frame. More would let
                # the start of every collective through for nothing.
                burst = max(_MIN_BURST, round(rate / 8 * _BURST_S))
                _tc(namespace, "replace", device, "tbf", "rate", f"{rate}bit",
                    "burst", str(burst), "limit", str(_QUEUE_BYTES + burst))  # fmt: skip

    def _build(self) -> None:
        for namespace in (self._switch, *map(self.name, range(self.num_hosts))):
            _ip("netns", "add", namespace)
            _ip("-n", namespace, "link", "set", "lo", "up")
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "mtu", str(MTU), "up")
        for host in range(self.num_hosts):
            name, port = self.name(host), f"port{host}"
            _ip("link", "add", INTERFACE, "mtu", str(MTU), "netns", name, "type", "veth",
                "peer", "name", port, "mtu", str(MTU), "netns", self._switch)  # fmt: skip
            _ip("-n", self._switch, "link", "set", port, "master", "bridge", "up")
            _ip("-n", name, "address", "add", f"{self.address(host)}/24", "dev", INTERFACE)
            _ip("-n", name, "link", "set", INTERFACE, "up")
            self._choose_congestion_control(host)
        self.limit(None)

    def _choose_congestion_control(self, host: int) -> None:
        for name in _CONGESTION_CONTROL:
            setting = "/proc/sys/net/ipv4/tcp_congestion_control"
            with contextlib.suppress(RuntimeError):
                _run(self.inside(host, ["sh", "-c", f"echo {name} > {setting}"]))
                return

    def _remove(self) -> None:
        with _signals_ignored():
            _remove_namespaces(
                [name for name in _namespaces() if name.startswith(f"{self._stem}-")]
            )


def require_privileges() -> None:
    """Raises RuntimeError, in one line that says what to do, where hosts cannot be made."""
    instead = "; `qsdp bench train` measures on a network that is there"
    for tool in ("ip", "tc"):
        if _tool(tool) is None:
            raise RuntimeError(
                f"the network benchmark needs Linux and iproute2, and there is no `{tool}`: "
                f"apt-get install iproute2{instead}"
            )
    if os.geteuid() != 0:
        raise RuntimeError(
            "the network benchmark makes network namespaces, which only root may do, and this is "
            f"user {os.geteuid()}: run it with sudo{instead}"
        )


def _remove_abandoned() -> None:
    """Remove hosts whose process was killed before it could."""
    abandoned = []
    for name in _namespaces():
        match = re.fullmatch(rf"{_PREFIX}-(\d+)-(?:\d+|switch)", name)
        if match and not Path(f"/proc/{match[1]}").exists():
            abandoned.append(name)
    _remove_namespaces(abandoned)


def sent_bytes(interface: str = INTERFACE) -> int:
    """Bytes that this process's network namespace has sent on ``interface``, headers included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.strip().partition(":")
        if name == interface:
            return int(counters.split()[8])
    raise RuntimeError(f"this host has no network interface {interface}")


def _remove_namespaces(names: list[str]) -> None:
    """End every process inside, then remove; what others removed meanwhile is no error."""
    deadline = time.monotonic() + _GRACE_S
    while pids := [pid for name in names for pid in _pids(name)]:
        late = time.monotonic() > deadline
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        time.sleep(0.1)
    for name in names:
        with contextlib.suppress(RuntimeError):
            _ip("netns", "delete", name)


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _ip("netns", "list").splitlines() if line]


def _pids(namespace: str) -> list[int]:
    try:
        return [int(pid) for pid in _ip("netns", "pids", namespace).split()]
    except RuntimeError:  # it is gone
        return []


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def _signals_ignored() -> Iterator[None]:
    """An impatient second Ctrl-C must not leave hosts behind."""
    before = {n: signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _tool(name: str) -> str | None:
    return shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", ""), _SBIN)))


def _ip(*arguments: str) -> str:
    return _run([_tool("ip") or "ip", *arguments])


def _tc(namespace: str, verb: str, device: str, *discipline: str) -> None:
    tc = _tool("tc") or "tc"
    _run([tc, "-n", namespace, "qdisc", verb, "dev", device, "root", *discipline])


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        message = " ".join((done.stderr or done.stdout).split())
        raise RuntimeError(
            f"`{' '.join(command)}` failed: {message}. The network benchmark needs root with the "
            "right to make network namespaces, and a kernel with veth, bridge and tbf"
        )
    return done.stdout
