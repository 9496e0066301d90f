"""The tokenizer of a run, and its text as token ids on disk.

Rank 0 trains the tokenizer and encodes the text; the files in the run folder are named by a hash of
all that they depend on, so that a resumed run finds them and no other run takes them for its own.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from qsdp.trainer.text import Text

Tokens = npt.NDArray[np.uint32]
END_OF_TEXT = "<|endoftext|>"


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """A tokenizer.json or a Hugging Face folder. Raises ValueError where it is neither."""
    try:
        if path.is_file():
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
            if tokenizer.eos_token is None and END_OF_TEXT in tokenizer.get_vocab():
                tokenizer.eos_token = END_OF_TEXT
            return tokenizer
        if path.is_dir():
            return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # tokenizers raises bare Exception on a file that it cannot parse
        raise ValueError(f"{path} holds no tokenizer that can be read: {error}") from error
    raise FileNotFoundError(f"--tokenizer: there is no file or folder {path}")


def train_tokenizer(text: Text, vocab_size: int, cache: Path) -> Path:
    """A byte-level BPE of the training text, found in `cache` where it was trained before."""
    path = cache / f"tokenizer-{_digest(text.train, str(vocab_size))}.json"
    if not path.is_file():
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(text.train, trainer)
        path.parent.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(path) + ".partial")
        os.replace(str(path) + ".partial", path)
    return path


def encode_to_file(documents: list[str], tokenizer: PreTrainedTokenizerBase, cache: Path) -> Path:
    """Token ids of the documents, each closed by the end-of-text token, as a .npy in `cache`."""
    path = cache / f"tokens-{_digest(documents, str(sorted(tokenizer.get_vocab().items())))}.npy"
    if not path.is_file():
        ids = [encode(document, tokenizer) for document in documents]
        save_tokens(path, np.concatenate(ids))
    return path


def encode(document: str, tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """Token ids of one document and the end-of-text token, where the tokenizer has one."""
    ids = tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return np.array([*ids, *end], dtype=np.uint32)


def save_tokens(path: Path, tokens: Tokens) -> None:
    """Write under another name first: a file that is there is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.save(file, tokens, allow_pickle=False)
    os.replace(partial, path)


def open_tokens(path: Path) -> Tokens:
    """The ids of a file that `save_tokens` wrote, mapped rather than read."""
    tokens: Tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    return tokens


def _digest(documents: list[str], settings: str) -> str:
    digest = hashlib.sha256(settings.encode())
    for document in documents:
        digest.update(hashlib.sha256(document.encode()).digest())
    return digest.hexdigest()[:16]
