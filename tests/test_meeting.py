"""A replica that is lost and returns: the others go on, and it takes over what they have."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from meeting_cases import ALONE, DIES_AFTER, STEPS, TIMEOUT_S, left_alone, replica
from ranks import CONTEXT

from qsdp import Meeting


def run(folder: Path, *, disturbed: bool) -> list[dict[str, Any]]:
    """Three replicas; disturbed, the last one dies in a round and is started again."""
    processes = [
        CONTEXT.Process(target=replica, args=(str(folder), name, disturbed and name == 2, False))
        for name in range(3)
    ]
    for process in processes:
        process.start()
    try:
        if disturbed:
            processes[2].join(timeout=TIMEOUT_S)
            assert processes[2].exitcode == 1
            # One that is back at once joins the synchronisation that is waiting for it.
            end = time.monotonic() + TIMEOUT_S
            while not (folder / ALONE).exists() and time.monotonic() < end:
                time.sleep(0.05)
            processes.append(CONTEXT.Process(target=replica, args=(str(folder), 2, False, True)))
            processes[3].start()
        end = time.monotonic() + TIMEOUT_S
        for process in processes:
            process.join(timeout=max(0.0, end - time.monotonic()))
        assert [process.exitcode for process in processes[:2]] == [0, 0]
        assert processes[-1].exitcode == 0
    finally:
        for process in processes:
            process.kill()
    return [torch.load(folder / f"{name}.pt") for name in range(3)]


@pytest.mark.ranks
@pytest.mark.timeout(240)
def test_a_replica_dies_and_returns(tmp_path: Path) -> None:
    """With weights of its own making it takes over the others'; the loss is that without it all."""
    for name in ("quiet", "disturbed"):
        (tmp_path / name).mkdir()
    quiet = run(tmp_path / "quiet", disturbed=False)
    disturbed = run(tmp_path / "disturbed", disturbed=True)
    for results in (quiet, disturbed):
        assert all(torch.equal(each["weights"], results[0]["weights"]) for each in results)
        assert [each["num_replicas"] for each in results] == [3, 3, 3]
    assert [each["joined_at"] for each in quiet] == [0, 0, 0]
    assert DIES_AFTER < disturbed[2]["joined_at"] < STEPS
    assert disturbed[2]["joined_at"] % 4 == 0
    assert not quiet[0]["warnings"]
    for survivor in disturbed[:2]:
        assert len(survivor["warnings"]) == 1
        assert "going on with 2 of 3 replicas" in survivor["warnings"][0]
    assert disturbed[0]["loss"] <= 1.1 * quiet[0]["loss"], (disturbed[0]["loss"], quiet[0]["loss"])


@pytest.mark.ranks
def test_who_is_left_in_a_group_is_told(tmp_path: Path) -> None:
    """Within the group's timeout, in one line; the step does not count, the weights stay."""
    processes = [CONTEXT.Process(target=left_alone, args=(str(tmp_path), r)) for r in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=TIMEOUT_S)
        process.kill()
    text, kept = torch.load(tmp_path / "error.pt")
    assert text.startswith("ReplicaSync: the synchronisation at step 2 failed, another replica is")
    assert "\n" not in text and kept


def test_what_a_meeting_refuses(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), -1)
    with pytest.raises(ValueError, match=r"Meeting\(replicas=...\) must be an integer"):
        Meeting(store, 0)
    with pytest.raises(ValueError, match=r"Meeting\(timeout=...\) must be a finite number"):
        Meeting(store, 2, timeout=0)
    with pytest.raises(RuntimeError, match="no group with Meeting.replicas=2. within join_timeout"):
        Meeting(store, 2, join_timeout=0.2).meet()
