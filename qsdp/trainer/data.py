"""The data of a run on one rank: tokenizer, training batches, validation tokens."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from qsdp.trainer.batches import Batches, TextBatches, validation_starts
from qsdp.trainer.config import TrainConfig
from qsdp.trainer.ranks import Ranks, on_rank_zero, together
from qsdp.trainer.text import read_text
from qsdp.trainer.tokenizer import (
    Tokens,
    encode_to_file,
    load_tokenizer,
    open_tokens,
    train_tokenizer,
)


class Data(NamedTuple):
    tokenizer: PreTrainedTokenizerBase
    batches: Batches
    valid: Tokens


class _Files(NamedTuple):
    """What rank 0 prepares and all ranks read; `train` is None where the text is streamed."""

    tokenizer: Path
    train: Path | None
    valid: Path


def prepare_data(config: TrainConfig, ranks: Ranks) -> Data:
    """Rank 0 trains the tokenizer and encodes the text, all ranks open the files; collective.

    Raises:
        ValueError: text that cannot be read, or is too short to train or to validate on.
    """
    paths = on_rank_zero(lambda: [str(path or "") for path in _prepare_files(config)])
    tokenizer, train, valid = paths
    files = _Files(Path(tokenizer), Path(train) if train else None, Path(valid))
    return together(lambda: _open(config, ranks, files))


def vocabulary_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Two tokenizers with the same digest give every id the same meaning."""
    entries = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(repr(entries).encode()).hexdigest()[:16]


def _prepare_files(config: TrainConfig) -> _Files:
    cache = config.run_folder / "data"
    if config.dataset:
        from qsdp.trainer.stream import encode_validation

        path = _given_tokenizer(config)
        assert path is not None  # checked before the ranks were started
        return _Files(path, None, encode_validation(config, load_tokenizer(path), cache))
    text = read_text(config)
    path = _given_tokenizer(config) or train_tokenizer(text, config.vocab_size, cache)
    tokenizer = load_tokenizer(path)
    train, valid = (encode_to_file(documents, tokenizer, cache) for documents in text)
    return _Files(path, train, valid)


def _given_tokenizer(config: TrainConfig) -> Path | None:
    return config.tokenizer or config.model


def _open(config: TrainConfig, ranks: Ranks, files: _Files) -> Data:
    tokenizer, valid = load_tokenizer(files.tokenizer), open_tokens(files.valid)
    validation_starts(len(valid), config.sequence_length, 1)
    micro_batches = config.micro_batches(ranks.num_ranks)
    micro = config.batch_size // (micro_batches * ranks.num_ranks)
    batches: Batches
    if files.train is None:
        from qsdp.trainer.stream import StreamBatches

        batches = StreamBatches(config, tokenizer, micro, ranks)
    else:
        batches = TextBatches(
            open_tokens(files.train),
            config.sequence_length,
            (micro_batches, ranks.num_ranks, micro),
            rank=ranks.rank,
            seed=config.seed,
        )
    return Data(tokenizer, batches, valid)
