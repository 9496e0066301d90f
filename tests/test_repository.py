"""The repository's own rules: imports point one way, privates in few places, small parts."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import io
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "qsdp"
FILES = sorted(PACKAGE.rglob("*.py"))
RESEARCH = sorted((ROOT / "research").rglob("*.py"))
SCRIPTS = sorted(p for folder in ("benchmarks", "examples") for p in (ROOT / folder).rglob("*.py"))
NATIVE = [PACKAGE / "kernels" / "cpu.cpp", *sorted((PACKAGE / "kernels" / "native").glob("*.h"))]

# Lower layers first. A module of the core imports from lower layers only, what stands beside the
# core from its own layer too, and the files of a package from each other.
LAYERS = (
    {"quantizer"},
    {"wire"},
    {"kernels", "columns", "arguments"},
    {"stats", "buffers", "streams", "watch"},
    {"rows", "levels"},
    {"ways"},
    {"config"},
    {"exchange", "memory", "residuals"},
    {"agreement", "ragged"},
    {"stages"},
    {"collectives"},
    {"param_group", "feedback"},
    {"unit", "contract"},
    {"comms"},
    {"fsdp", "ddp", "second_moment"},
    {"state", "decoded"},
    {"local"},
    {"qat"},
    {"plan"},
    {"auto"},
    {""},  # the package itself: public names
    {"check"},
    {"trainer", "integrations"},
    {"bench", "domains", "sweep", "tune"},
    {"cli"},
    {"__main__"},
)
# Beside the core, which is all else.
BESIDE = {
    *("arguments", "auto", "trainer", "bench", "local", "plan", "sweep", "tune", "integrations"),
    *("domains", "qat"),
}
# Files that were checked against one version of torch.
PRIVATE = {"qsdp/param_group.py", "qsdp/contract.py", "qsdp/buffers.py", "qsdp/stats.py"}
# Underscores that are no privates: a named tuple's methods, and what is documented for users.
NOT_PRIVATE = {"_asdict", "_replace", "_make", "_fields", "_field_defaults", "_no_split_modules"}

MAX_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_CORE_LINES = 8150  # 2,100 of them Triton, 350 the bridge to C++


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def layer_of(name: str) -> int:
    return next(i for i, layer in enumerate(LAYERS) if name in layer)


def imports(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, "imports are absolute"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_point_one_way(path: Path) -> None:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    own = "" if parts == ("__init__",) else parts[0]
    for name in imports(ast.parse(path.read_text())):
        if name.split(".")[0] != "qsdp":
            continue
        target = name.partition(".")[2].split(".")[0]
        known = any(target in layer for layer in LAYERS)
        target = target if known else ""
        same = target == own if own not in BESIDE else layer_of(target) == layer_of(own)
        inside = same and len(parts) > 1
        assert inside or layer_of(target) < layer_of(own), f"{name_of(path)} imports {name}"


def test_layers_name_all_that_there_is() -> None:
    there = {path.relative_to(PACKAGE).with_suffix("").parts[0] for path in FILES}
    assert (there - {"__init__"}) | {""} == set().union(*LAYERS)


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names(tree: ast.AST) -> tuple[set[str], set[str]]:
    """Names imported from qsdp or defined here, and private attributes that this file makes."""
    names, attributes = {"self", "cls"}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "qsdp":
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            ours = [alias for alias in node.names if alias.name.split(".")[0] == "qsdp"]
            names |= {alias.asname or "qsdp" for alias in ours}
        elif isinstance(node, ast.ClassDef):
            names.add(node.name)
            for part in node.body:
                if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                    attributes.add(part.name)
                elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                    attributes.add(part.target.id)
                elif isinstance(part, ast.Assign):
                    attributes |= {t.id for t in part.targets if isinstance(t, ast.Name)}
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            attributes.add(node.attr)
    return names, attributes


def foreign_privates(source: str) -> Iterator[str]:
    """Private attributes of what is not ours, by name or by a string, and private imports."""
    tree = ast.parse(source)
    names, attributes = own_names(tree)
    for name in imports(tree):
        if name.split(".")[0] != "qsdp" and any(map(private, name.split("."))):
            yield name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner, attribute = node.value, node.attr
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("getattr", "setattr", "hasattr", "delattr")
            and len(node.args) > 1
            and isinstance(node.args[1], ast.Constant)
        ):
            owner, attribute = node.args[0], str(node.args[1].value)
        else:
            continue
        of = owner.id if isinstance(owner, ast.Name) else ""
        if (
            private(attribute)
            and of not in names
            and attribute not in attributes
            and attribute not in NOT_PRIVATE
            and (of, attribute) not in {("os", "_exit"), ("atexit", "_run_exitfuncs")}
        ):
            yield f"line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_privates_of_others_stay_where_they_are_checked(path: Path) -> None:
    """FSDP2's and torch's, as attributes and as imports."""
    if name_of(path) not in PRIVATE:
        assert list(foreign_privates(path.read_text())) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("x._fsdp_param_groups", ["line 1: x._fsdp_param_groups"]),
        ("module._get_fsdp_state()", ["line 1: module._get_fsdp_state"]),
        ("self.group._all_gather_comm = 3", ["line 1: self.group._all_gather_comm"]),
        ("import torch\ntorch._foreach_norm(x)", ["line 2: torch._foreach_norm"]),
        ("getattr(param, '_local_tensor', 0)", ["line 1: getattr(param, '_local_tensor', 0)"]),
        ("from torch.distributed.fsdp._fully_shard import x", None),
        ("from torch._C import x", None),
        ("import os\nos._exit(1)", []),
        ("x.__dict__", []),
        ("pair._asdict()", []),
        ("self._x = cls._y", []),
        ("from qsdp.kernels import cpu\ncpu._load()", []),
        ("import qsdp.kernels\nqsdp._x", []),
        ("import qsdp.kernels\nqsdp.kernels._x", ["line 2: qsdp.kernels._x"]),
        ("class A:\n  _b: int\n  def _c(self): self._d = 1\nx._b + x._c + x._d", []),
        ("class A:\n  _b = 0\nA._z + x._b", []),
        ("class A:\n  def f(self, group): group._d = 1", ["line 2: group._d"]),
        ("def _free(x): return x._free", ["line 1: x._free"]),
    ],
)
def test_the_rule_on_privates_is_precise(source: str, found: list[str] | None) -> None:
    flagged = list(foreign_privates(source))
    assert flagged == found if found is not None else len(flagged) == 1


@pytest.mark.parametrize("path", [*FILES, *RESEARCH, *NATIVE], ids=name_of)
def test_files_stay_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES


def docstring_lines(node: ast.AST) -> range:
    """Of a module, a class or a function."""
    body = getattr(node, "body", None)
    first = body[0] if isinstance(body, list) and body else None
    if not isinstance(first, ast.Expr) or not isinstance(first.value, ast.Constant):
        return range(0)
    text = isinstance(first.value.value, str)
    return range(first.lineno, (first.end_lineno or 0) + 1) if text else range(0)


@pytest.mark.parametrize("path", [*FILES, *RESEARCH], ids=name_of)
def test_functions_stay_small(path: Path) -> None:
    """Without their docstrings."""
    long = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1 - len(docstring_lines(node))
            if lines > MAX_FUNCTION_LINES:
                long.append(f"{node.name}: {lines} lines")
    assert long == []


def code_lines(source: str) -> int:
    """Lines without empty ones, comments and docstrings."""
    nothing = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in nothing and token.type != tokenize.ENDMARKER:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        lines -= set(docstring_lines(node))
    return len(lines)


def test_the_core_stays_small() -> None:
    """Lines of code in Python: what quantizes, communicates and remembers, and its kernels."""
    core = [
        path for path in FILES if path.relative_to(PACKAGE).with_suffix("").parts[0] not in BESIDE
    ]
    assert sum(code_lines(path.read_text()) for path in core) <= MAX_CORE_LINES


def outside_imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "qsdp":
            yield from ((str(node.module), alias.name) for alias in node.names)


@pytest.mark.parametrize("path", SCRIPTS, ids=name_of)
def test_scripts_import_what_there_is(path: Path) -> None:
    """Benchmarks and examples, which no type checker reads and few tests run."""
    for module, name in outside_imports(ast.parse(path.read_text())):
        found = importlib.import_module(module)
        submodule = importlib.util.find_spec(f"{module}.{name}") if _is_package(found) else None
        assert hasattr(found, name) or submodule, f"{module} has no {name}"


def _is_package(module: ModuleType) -> bool:
    return hasattr(module, "__path__")


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
        "assert (qsdp.decode(qsdp.encode(x, q), 5000, q) - x).abs().max() < 1\n"
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
