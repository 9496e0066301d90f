"""Batches of token windows out of a text: a pure function of seed and step.

Nothing here has state, so a resumed run needs none. Every epoch cuts the text into windows at
another offset and visits each window once, in another order; the ranks share out one global batch,
so the windows of a step do not depend on the number of ranks.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from qsdp.trainer.tokenizer import Tokens

Starts = npt.NDArray[np.int64]


class Batches(Protocol):
    """What the training loop asks of a source of tokens."""

    def batch(self, step: int, micro_batch: int) -> torch.Tensor:
        """Token ids of this rank's next micro-batch, int64, (sequences, sequence_length + 1)."""

    def state(self) -> dict[str, Any]:
        """JSON values from which `load_state` continues, on this rank."""

    def load_state(self, state: dict[str, Any]) -> None: ...


class TextBatches:
    """Batches of one rank out of a text that lies on disk."""

    def __init__(
        self,
        tokens: Tokens,
        sequence_length: int,
        shape: tuple[int, int, int],
        *,
        rank: int,
        seed: int,
    ) -> None:
        """`shape` is (micro-batches, ranks, sequences in a micro-batch) of one step."""
        batch_size = int(np.prod(shape))
        if num_windows(len(tokens), sequence_length) < batch_size:
            raise ValueError(
                f"the training text holds {len(tokens)} tokens, fewer than one batch of "
                f"{batch_size} windows of {sequence_length} needs; give more --data or lower "
                "--batch-size or --sequence-length"
            )
        self._tokens = tokens
        self._sequence_length = sequence_length
        self._shape = shape
        self._rank = rank
        self._seed = seed

    def batch(self, step: int, micro_batch: int) -> torch.Tensor:
        starts = batch_starts(
            len(self._tokens),
            self._sequence_length,
            int(np.prod(self._shape)),
            seed=self._seed,
            step=step,
        )
        mine = starts.reshape(self._shape)[micro_batch, self._rank]
        return windows(self._tokens, mine, self._sequence_length)

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        pass


def num_windows(num_tokens: int, sequence_length: int) -> int:
    """Windows in an epoch, whatever its offset."""
    return max(0, (num_tokens - sequence_length) // sequence_length)


def batch_starts(
    num_tokens: int, sequence_length: int, batch_size: int, *, seed: int, step: int
) -> Starts:
    """First tokens of the windows of step 1, 2, ...; (batch_size,)."""
    steps_per_epoch = num_windows(num_tokens, sequence_length) // batch_size
    epoch, index = divmod(step - 1, steps_per_epoch)
    starts = _epoch_starts(num_tokens, sequence_length, seed, epoch)
    return starts[index * batch_size : (index + 1) * batch_size]


@functools.lru_cache(maxsize=2)
def _epoch_starts(num_tokens: int, sequence_length: int, seed: int, epoch: int) -> Starts:
    generator = np.random.Generator(np.random.Philox(key=[seed, epoch]))
    offset = int(generator.integers(sequence_length))
    order = generator.permutation(num_windows(num_tokens, sequence_length))
    return order * sequence_length + offset


def validation_starts(num_tokens: int, sequence_length: int, limit: int) -> Starts:
    """At most `limit` windows, spread evenly over the text."""
    available = (num_tokens - 1) // sequence_length
    if available < 1:
        raise ValueError(
            f"the validation text holds {num_tokens} tokens, fewer than one window of "
            f"{sequence_length}; give a longer --valid, raise --valid-fraction, or lower "
            "--sequence-length"
        )
    count = min(limit, available)
    return np.arange(count, dtype=np.int64) * available // count * sequence_length


def windows(tokens: Tokens, starts: Starts, sequence_length: int) -> torch.Tensor:
    """Token ids, int64, (windows, sequence_length + 1): inputs, and the same shifted by one."""
    rows = [np.asarray(tokens[s : s + sequence_length + 1], dtype=np.int64) for s in starts]
    return torch.from_numpy(np.stack(rows))
