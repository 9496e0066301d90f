"""Batches out of a data set that `datasets` streams, such as C4.

Every rank reads its own part of the stream, packs documents one after the other and cuts the row of
tokens into windows. Where it stands in the stream is saved with each checkpoint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from datasets.distributed import split_dataset_by_node
from transformers import PreTrainedTokenizerBase

from qsdp.trainer.config import TrainConfig
from qsdp.trainer.ranks import Ranks
from qsdp.trainer.text import read_file
from qsdp.trainer.tokenizer import encode, save_tokens


class StreamBatches:
    """Batches of one rank; steps must be asked for in order.

    Raises:
        ValueError: the data set cannot be opened, or holds no text for this rank.
    """

    def __init__(
        self,
        config: TrainConfig,
        tokenizer: PreTrainedTokenizerBase,
        micro_batch_size: int,
        ranks: Ranks,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._shape = (micro_batch_size, config.sequence_length)
        stream = open_stream(config, config.dataset_split)
        self._dataset = split_dataset_by_node(stream, ranks.rank, ranks.num_ranks)
        self._epoch = 0
        self._documents: Iterator[dict[str, Any]] = iter(self._dataset)
        # The first document already, so that a run on a data set without text ends at its start.
        self._buffer = self._next_tokens()

    def batch(self, step: int, micro_batch: int) -> torch.Tensor:
        micro_batch_size, length = self._shape
        needed = micro_batch_size * length + 1
        while len(self._buffer) < needed:
            self._buffer.extend(self._next_tokens())
        row = torch.tensor(self._buffer[:needed])
        # The last target is the first input of the next batch.
        self._buffer = self._buffer[needed - 1 :]
        return row.unfold(0, length + 1, length)

    def state(self) -> dict[str, Any]:
        return {
            "stream": self._dataset.state_dict(),
            "epoch": self._epoch,
            "buffer": self._buffer,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        # First the epoch: `datasets` takes a place in the stream only for the epoch that it is in.
        self._epoch = state["epoch"]
        self._dataset.set_epoch(self._epoch)
        self._dataset.load_state_dict(state["stream"])
        self._buffer = list(state["buffer"])
        self._documents = iter(self._dataset)

    def _next_tokens(self) -> list[int]:
        ids: list[int] = encode(self._next_document(), self._tokenizer).tolist()
        return ids

    def _next_document(self) -> str:
        for _ in range(2):
            document = next(self._documents, None)
            if document is not None:
                return document_text(document, self._config.text_field)
            # The stream is at its end: once more from the start.
            self._epoch += 1
            self._dataset.set_epoch(self._epoch)
            self._documents = iter(self._dataset)
        raise ValueError(f"--dataset {self._config.dataset} has no document for this rank")


def open_stream(config: TrainConfig, split: str) -> Any:
    """The split as an iterable data set. Raises ValueError where `datasets` cannot open it."""
    files = [str(path) for path in config.dataset_files] or None
    try:
        return datasets.load_dataset(
            config.dataset, config.dataset_config, split=split, data_files=files, streaming=True
        )
    except Exception as error:  # datasets and its file systems raise many kinds
        raise ValueError(f"--dataset {config.dataset}, split {split}: {error}") from error


def document_text(document: dict[str, Any], field: str) -> str:
    if field not in document:
        raise ValueError(f"--text-field must be one of {', '.join(document)}, got {field}")
    return str(document[field])


def encode_validation(config: TrainConfig, tokenizer: PreTrainedTokenizerBase, cache: Path) -> Path:
    """Tokens to validate on, as a .npy: --valid, or the head of --dataset-valid-split."""
    limit = max(config.eval_windows, config.final_eval_windows) * config.sequence_length + 1
    if config.valid is not None:
        documents: Iterator[str] = iter([read_file(config.valid, "--valid")])
    else:
        stream = open_stream(config, config.dataset_valid_split)
        documents = (document_text(document, config.text_field) for document in stream)
    ids: list[int] = []
    for document in documents:
        ids.extend(encode(document, tokenizer).tolist())
        if len(ids) >= limit:
            break
    tokens = np.array(ids[:limit], dtype=np.uint32)
    path = cache / f"valid-{hashlib.sha256(tokens.tobytes()).hexdigest()[:16]}.npy"
    save_tokens(path, tokens)
    return path
