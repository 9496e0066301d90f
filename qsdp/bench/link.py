"""`qsdp bench link`: latency and bandwidth between ranks.

    torchrun ... -m qsdp bench link     between the ranks that your torchrun starts
    qsdp bench link --nproc 4           between ranks on this machine

Latency is half of a round trip of one small message. Bandwidth is that of one direction while both
are busy, as in FSDP2's collectives: two ranks swap messages of --mib each. Pairs are measured one
after another, and then all ranks of every node at once, each with its place on the next node: what
a node's ranks get together is what a two-level collective can use.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from qsdp.agreement import all_gather_json
from qsdp.bench.launch import run_ranks
from qsdp.bench.parsers import link_parser
from qsdp.columns import format_columns
from qsdp.trainer.ranks import process_group

PING_BYTES = 64
ROUND_TRIPS = 30
SWAPS = 5
MAX_RANKS_FOR_ALL_PAIRS = 8


class Link(NamedTuple):
    """What was measured between two ranks, or for "node" between two nodes; keys of ``--json``."""

    kind: str
    source: int
    target: int
    latency_us: float
    gbps: float


def main(argv: list[str]) -> int:
    """Measure and print on rank 0; returns the exit status."""
    options = link_parser().parse_args(argv)
    if options.mib <= 0:
        raise ValueError(f"--mib must be above 0, got {options.mib}")
    return run_ranks(["link", *argv], options.nproc, lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    with process_group(options.device, options.timeout) as ranks:
        links = measure_links(ranks.device, round(options.mib * 2**20))
        if ranks.rank != 0:
            return
        if options.json:
            print(json.dumps([link._asdict() for link in links], indent=1))
        else:
            print(format_links(links))


def measure_links(device: torch.device, num_bytes: int) -> list[Link]:
    """Measure pairs one by one, then whole nodes; a collective call, equal on every rank."""
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    pairs = [(a, b) for b in range(num_ranks) for a in range(b)]
    if num_ranks > MAX_RANKS_FOR_ALL_PAIRS:
        pairs = [(a, a + 1) for a in range(num_ranks - 1)]
    links = []
    for a, b in pairs:
        dist.barrier()
        if rank in (a, b):
            peer = b if rank == a else a
            latency, gbps = _latency(peer, rank == a, device), _bandwidth(peer, num_bytes, device)
            kind = "intra" if a // local_size == b // local_size else "inter"
            if rank == a:
                links.append(Link(kind, a, b, latency * 1e6, gbps))
    dist.barrier()
    if 1 < local_size < num_ranks and num_ranks % local_size == 0:
        links += _node_link(local_size, num_bytes, device)
    found = [
        Link(**link) for rows in all_gather_json([x._asdict() for x in links]) for link in rows
    ]
    return sorted(found)


def format_links(links: list[Link]) -> str:
    """The table, and what `qsdp plan` takes: medians over links of a kind.

    With one rank a node, what a pair between nodes gets is what the node gets.
    """
    words = {"intra": "inside a node", "inter": "between nodes", "node": "node to node, all ranks"}
    rows = [
        (words[x.kind], str(x.source), str(x.target), f"{x.latency_us:.0f}", f"{x.gbps:.2f}")
        for x in links
    ]
    table = format_columns(("link", "from", "to", "latency us", "Gbit/s"), rows)
    kinds = {kind: [link for link in links if link.kind == kind] for kind in words}
    flags = {
        "--intra-gbps": [link.gbps for link in kinds["intra"]],
        "--intra-latency-us": [link.latency_us for link in kinds["intra"]],
        "--bandwidth": [link.gbps for link in kinds["node"] or kinds["inter"]],
        "--latency-us": [link.latency_us for link in kinds["inter"]],
    }
    given = [f"{flag} {statistics.median(found):.3g}" for flag, found in flags.items() if found]
    return f"{table}\n\nfor qsdp plan: {' '.join(given)}" if given else table


def _latency(peer: int, first: bool, device: torch.device) -> float:
    """Seconds one way."""
    message = torch.zeros(PING_BYTES, dtype=torch.uint8, device=device)

    def round_trip() -> None:
        if first:
            dist.send(message, peer)
            dist.recv(message, peer)
        else:
            dist.recv(message, peer)
            dist.send(message, peer)

    return _median_seconds(round_trip, ROUND_TRIPS, device) / 2


def _bandwidth(peer: int, num_bytes: int, device: torch.device) -> float:
    """Gbit/s of one direction while both send."""
    out, into = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))

    def swap() -> None:
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, out, peer), dist.P2POp(dist.irecv, into, peer)]
        )
        for work in works:
            work.wait()

    return num_bytes * 8e-9 / _median_seconds(swap, SWAPS, device)


def _node_link(local_size: int, num_bytes: int, device: torch.device) -> list[Link]:
    """Nodes 0 and 1, 2 and 3, ... swap at once, every rank with its place on the other node."""
    rank, num_nodes = dist.get_rank(), dist.get_world_size() // local_size
    node, place = divmod(rank, local_size)
    other = node ^ 1
    gbps = 0.0
    if other < num_nodes:
        gbps = _bandwidth(other * local_size + place, num_bytes, device)
    dist.barrier()
    everyone = all_gather_json(gbps)
    if place or node > other or other >= num_nodes:
        return []
    total = sum(everyone[rank : rank + local_size])
    return [Link("node", node, other, 0.0, total)]


def _median_seconds(run: Callable[[], None], repetitions: int, device: torch.device) -> float:
    seconds = []
    for _ in range(repetitions + 1):  # the first opens connections
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])
