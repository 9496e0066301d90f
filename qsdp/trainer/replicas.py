"""The flags of local steps: replicas that train on their own and average their weights.

Neither torch nor transformers is imported here, as in config.py, which these fields belong to.
"""

from __future__ import annotations

import dataclasses
import math


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaFlags:
    """How the replicas of --replicate train on their own."""

    sync_every: int | None = None
    """Local steps: the replicas of --replicate reduce no gradients, each takes optimizer steps of
    its own, and after so many they average their weights. Left out, they reduce gradients."""
    sync_alpha: float = 0.0
    """QSR: a round takes (alpha / learning rate) ** power steps where that is more than
    --sync-every; 0 keeps the interval constant. The warm-up counts as constant."""
    sync_power: float = 2.0
    """Power of QSR; 1 and 3 are its comparisons."""
    sync_longest: int | None = None
    """No round is longer; left out, the end of training is the only limit."""
    sync_bits: int = 32
    """Bits in which replicas send what their weights moved by, with feedback of what is lost: 2 to
    8, or 32 for full precision."""
    sync_fragments: int = 1
    """Parts of the model that are synchronised in turn, evenly over a round."""
    sync_overlap: int = 0
    """Steps that a part's average may take to arrive, while training goes on; 0 waits for it."""
    outer_lr: float | None = None
    """DiLoCo: learning rate of the outer step, such as 0.7; left out, weights are averaged."""
    outer_momentum: float | None = None
    """Nesterov momentum of the outer step; default 0.9. Needs --outer-lr."""


DEFAULTS = ReplicaFlags()
NAMES = tuple(field.name for field in dataclasses.fields(ReplicaFlags))


def check_replica_flags(
    flags: ReplicaFlags, *, replicate: int, quantize_replicas: bool, comm: str
) -> None:
    """Raises ValueError, in a line that names the flag, where one is out of range or does not act.

    Args:
        replicate, quantize_replicas, comm: the run's other settings of these names.
    """
    if flags.sync_every is None:
        for name in NAMES:
            if getattr(flags, name) != getattr(DEFAULTS, name):
                raise ValueError(f"{_flag(name)} needs --sync-every STEPS")
        return
    if flags.outer_momentum is not None and flags.outer_lr is None:
        raise ValueError("--outer-momentum needs --outer-lr, such as 0.7")
    if replicate == 1:
        raise ValueError("--sync-every needs --replicate N: there is one replica")
    if not quantize_replicas:
        raise ValueError(
            "--no-quantize-replicas is about gradients, which replicas with --sync-every do not "
            "reduce: leave it out, and give --sync-bits"
        )
    if comm == "auto":
        raise ValueError(
            "--comm auto decides for gradients of every step, and does not go with --sync-every: "
            "give the bits inside a replica, such as w8g8"
        )
    _check_ranges(flags)


def _check_ranges(flags: ReplicaFlags) -> None:
    every, longest = flags.sync_every or 1, flags.sync_longest
    lr, momentum = flags.outer_lr, flags.outer_momentum
    ranges = {
        "sync_every": (every == flags.sync_every and every >= 1, "at least 1"),
        "sync_alpha": (0 <= flags.sync_alpha < math.inf, "at least 0"),
        "sync_power": (0 <= flags.sync_power < math.inf, "at least 0"),
        "sync_longest": (longest is None or longest >= every, f"at least --sync-every {every}"),
        "sync_bits": (flags.sync_bits in (*range(1, 9), 32), "1 to 8, or 32"),
        "sync_fragments": (flags.sync_fragments >= 1, "at least 1"),
        "sync_overlap": (
            0 <= flags.sync_overlap < every,
            f"at least 0 and below --sync-every {every}",
        ),
        "outer_lr": (lr is None or 0 < lr < math.inf, "above 0"),
        "outer_momentum": (momentum is None or 0 <= momentum < 1, "at least 0 and below 1"),
    }
    for name, (good, allowed) in ranges.items():
        if not good:
            raise ValueError(f"{_flag(name)} must be {allowed}, got {getattr(flags, name)}")
    if flags.sync_alpha == 0:
        for name in ("sync_power", "sync_longest"):
            if getattr(flags, name) != getattr(DEFAULTS, name):
                raise ValueError(f"{_flag(name)} needs --sync-alpha: the interval is constant")
