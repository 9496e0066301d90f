"""The repository's own rules: imports point one way, private torch in few places, small files."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "qsdp"
FILES = sorted(PACKAGE.rglob("*.py"))

# Lower layers first; a module may import from its own layer's predecessors and itself.
LAYERS = (
    {"wire", "kernels", "columns"},
    {"quantizer"},
    {"stats", "buffers", "config", "agreement", "levels", "works"},
    {"collectives", "kept"},
    {"two_level", "units", "learning"},
    {"comms"},
    {"differences"},
    {"fsdp", "ddp", "state"},
    {""},  # the package itself: public names
    {"trainer", "bench", "check", "theory", "integrations"},
    {"sweep", "tune", "plan"},
    {"cli"},
)
PRIVATE_TORCH = {"qsdp/units.py", "qsdp/buffers.py"}
MAX_LINES = 400


def layer_of(name: str) -> int:
    return next(i for i, layer in enumerate(LAYERS) if name in layer)


def imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    if parts in (("__main__",), ("__init__",)):
        return
    own = layer_of(parts[0])
    for name in imports(path):
        if name.split(".")[0] != "qsdp":
            continue
        target = name.partition(".")[2].split(".")[0]
        known = any(target in layer for layer in LAYERS)
        assert layer_of(target if known else "") <= own, f"{path.name} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_private_torch_names_stay_where_they_are_checked(path: Path) -> None:
    if str(path.relative_to(ROOT)) in PRIVATE_TORCH:
        return
    for name in imports(path):
        parts = name.split(".")
        assert parts[0] != "torch" or not any(part.startswith("_") for part in parts), name


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_stay_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES


def test_import_needs_torch_alone_and_has_no_side_effect() -> None:
    """No extra, no Triton, no process group, no native library; nothing printed."""
    code = (
        "import sys\n"
        "for name in ('triton', 'transformers', 'numpy', 'rich', 'tyro', 'datasets'):\n"
        "    sys.modules[name] = None\n"
        "import torch, qsdp\n"
        "assert not torch.distributed.is_initialized()\n"
        "assert 'qsdp.kernels.cpu' not in sys.modules and 'qsdp.trainer' not in sys.modules\n"
        "q = qsdp.Quantizer(4)\n"
        "x = torch.randn(5000)\n"
        "assert (q.decode(q.encode(x), 5000) - x).abs().max() < 1\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore:Failed to initialize NumPy", "-c", code],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def test_public_names() -> None:
    import qsdp

    assert sorted(qsdp.__all__) == qsdp.__all__
    assert all(getattr(qsdp, name).__doc__ for name in qsdp.__all__)
