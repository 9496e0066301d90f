"""Without a GPU, Triton's kernels are interpreted in the tests.

Triton looks at TRITON_INTERPRET where its functions are decorated, its own library's among them: at
its first import. Frameworks import it too, so it has to be imported here, before they are.
"""

from __future__ import annotations

import contextlib
import os

import pytest
import torch

if not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(ImportError):
        patch.setenv("TRITON_INTERPRET", "1")
        import triton  # noqa: F401
        import triton.language  # noqa: F401
