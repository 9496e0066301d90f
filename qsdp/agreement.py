"""Do all ranks of a group want the same thing? Asked before anything is installed.

Nothing is pickled: ranks exchange digests and JSON text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from qsdp.exchange import all_gather_single


def require_agreement(
    facts: Mapping[str, Any], error: str | None, group: dist.ProcessGroup, device: torch.device
) -> None:
    """Raise on every rank of ``group`` unless all hold equal ``facts`` and none has an ``error``.

    A collective call: a rank that found its own input bad calls it with ``error`` set, so that the
    others learn of it instead of waiting.

    Args:
        facts: nested mappings of JSON values.
        error: what is wrong on this rank, or None.
        group: the ranks to ask.
        device: where the group's backend takes tensors.

    Raises:
        ValueError: on every rank, one line that names the first difference or the failing rank.
    """
    text = json.dumps({"facts": facts, "error": error}, sort_keys=True).encode()
    digest = torch.frombuffer(bytearray(hashlib.sha256(text).digest()), dtype=torch.uint8)
    digests = _all_gather(digest.to(device), group)
    if error is None and bool((digests == digests[0]).all()):
        return
    answers = [json.loads(answer) for answer in _all_gather_text(text, group, device)]
    for rank, answer in enumerate(answers):
        if answer["error"] is not None:
            raise ValueError(
                answer["error"]
                if error is not None
                else f"rank {rank} of the group stopped: {answer['error']}"
            )
    for rank, answer in enumerate(answers):
        difference = first_difference(answers[0]["facts"], answer["facts"])
        if difference is not None:
            path, ours, theirs = difference
            raise ValueError(
                f"qsdp needs the same {path} on all ranks, got {ours} on rank 0 and "
                f"{theirs} on rank {rank} of the group: give all ranks an equal model and config"
            )
    raise AssertionError("digests differ but texts do not")


def require_agreement_in(
    groups: Mapping[dist.ProcessGroup, torch.device],
    facts: Mapping[str, Any],
    error: Exception | None,
) -> None:
    """:func:`require_agreement` in several groups that share ranks, so that all learn of an error.

    A rank whose group disagrees tells its other groups before it raises, or their ranks would wait.

    Args:
        groups: with the device of each, in the same order on all ranks.
        error: what is wrong on this rank, raised here as it is; or None.

    Raises:
        ValueError: as :func:`require_agreement`.
    """
    failure = error
    for group, device in groups.items():
        try:
            require_agreement(facts, None if failure is None else str(failure), group, device)
        except ValueError as raised:
            failure = failure or raised
    if failure is not None:
        raise failure


def all_gather_json(
    value: Any, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu"
) -> list[Any]:
    """Every rank's ``value``, by rank; a collective call.

    Args:
        value: a JSON value; it arrives as JSON gives it back, tuples as lists.
        group: the ranks, None for all.
        device: where the group's backend takes tensors.
    """
    text = json.dumps(value).encode()
    return [json.loads(answer) for answer in _all_gather_text(text, group, torch.device(device))]


def first_difference(a: Any, b: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """``(path, value in a, value in b)`` of the first place where two JSON values differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        for name in [*a, *(k for k in b if k not in a)]:
            inner = f"{path}.{name}" if path else str(name)
            found = first_difference(a.get(name), b.get(name), inner)
            if found is not None:
                return found
        return None
    return None if a == b else (path, a, b)


def _all_gather(row: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """(num_ranks, row.numel())"""
    num_ranks = dist.get_world_size(group)
    rows = torch.empty(num_ranks * row.numel(), dtype=row.dtype, device=row.device)
    all_gather_single(rows, row, group=group)
    return rows.view(num_ranks, -1)


def _all_gather_text(
    text: bytes, group: dist.ProcessGroup | None, device: torch.device
) -> list[bytes]:
    length = torch.tensor([len(text)], dtype=torch.int64, device=device)
    lengths = _all_gather(length, group).flatten().tolist()
    padded = bytearray(text.ljust(max(lengths), b" "))
    rows = _all_gather(torch.frombuffer(padded, dtype=torch.uint8).to(device), group).cpu()
    return [bytes(row[:size].tolist()) for row, size in zip(rows, lengths, strict=True)]
