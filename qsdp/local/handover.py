"""What replicas that are ahead give to those that are behind, once a new group has formed."""

from __future__ import annotations

from qsdp.local.peers import Peers
from qsdp.local.state import SyncMemory


def hand_over(memory: SyncMemory, peers: Peers, progress: list[int]) -> list[int]:
    """Bring every rank of a new group to where the furthest is; a collective call of it.

    1. The first of those who are furthest gives anchor and momentum.
    2. Who is behind takes the anchor as its weights; where none is kept, the giver's weights.
    3. Residuals start from zero, and what was under way is dropped: it was between others.

    Args:
        memory: changed in place.
        progress: of this rank, compared in order; lower for one that joins than for all others.

    Returns:
        The progress of the furthest, the same on all ranks.
    """
    of_all = peers.ask(progress)
    furthest: list[int] = max(of_all)
    giver = of_all.index(furthest)
    memory.start_afresh(peers.size)
    if all(each == furthest for each in of_all):
        return furthest
    for part in memory.all_parts:
        for _, flat in part.memories():
            peers.give(flat, giver)
        values = part.anchor
        if values is None:
            values = part.values()
            peers.give(values, giver)
        if progress != furthest:
            part.write(values)
    return furthest
