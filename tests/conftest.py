"""What tests share: a text to train on, and Triton's kernels interpreted where there is no GPU.

Triton looks at TRITON_INTERPRET where its functions are decorated, its own library's among them: at
its first import. Frameworks import it too, so it has to be imported here, before they are.
"""

from __future__ import annotations

import contextlib
import os
import random
from pathlib import Path

import pytest

# Tensors here are small, and threads that wait for each other spin on cores that other tests want:
# seven eighths of the processor time of some files. OpenMP looks at it when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(ImportError):
        patch.setenv("TRITON_INTERPRET", "1")
        import triton  # noqa: F401
        import triton.language  # noqa: F401


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sentences of a few words, which a small model learns quickly."""
    words = random.Random(0)
    sentence = "the {} king {} and the {} queen {}.\n".format
    lines = [
        sentence(*(words.choice(["old", "young", "good", "mad"]) for _ in range(4)))
        for _ in range(1500)
    ]
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("".join(lines))
    return file
