"""`qsdp train`: configuration, checkpoints, and a few short runs of two ranks."""

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from qsdp.cli import main
from qsdp.trainer import checkpoint, loop
from qsdp.trainer.batches import validation_starts, windows
from qsdp.trainer.comm import quantize_communication
from qsdp.trainer.command import parse
from qsdp.trainer.config import PRESETS, TrainConfig
from qsdp.trainer.evaluate import token_losses
from qsdp.trainer.launch import _cause
from qsdp.trainer.model import build_model, new_model, shard
from qsdp.trainer.ranks import Ranks, SharedError
from qsdp.trainer.text import Text, read_text
from qsdp.trainer.tokenizer import encode, load_tokenizer, train_tokenizer
from qsdp.trainer.warmup import learning_rate

# ---- configuration


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lr": 0.0}, "--lr must be a positive number, got 0.0"),
        ({"lr": float("nan")}, "--lr must be a positive number, got nan"),
        ({"steps": 0}, "--steps must be at least 1, got 0"),
        ({"width": 100, "heads": 3}, "--width must be a multiple of --heads 3, got 100"),
        ({"valid_fraction": 1.0}, "--valid-fraction must be at least 0 and below 1, got 1.0"),
        ({"ranks_per_node": 0}, "--ranks-per-node must be at least 1, or left out, got 0"),
        ({"micro_batch_size": 0}, "--micro-batch-size must be at least 1, got 0"),
        ({"data": (Path("a"),), "dataset": "c4"}, "--data and --dataset exclude each other"),
        ({"valid": Path("a")}, "--valid needs --data or --dataset"),
        ({"dataset_files": (Path("a"),)}, "--dataset-files needs --dataset"),
    ],
)
def test_bad_settings_name_the_flag_and_what_is_allowed(fields, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**fields)


def test_micro_batches_divide_the_batch():
    config = TrainConfig(batch_size=16, micro_batch_size=2)
    assert config.micro_batches(2) == 4
    assert TrainConfig(batch_size=16).micro_batches(4) == 1
    with pytest.raises(ValueError, match=r"= 3 \* 2, got 16"):
        config.micro_batches(3)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_whole_configurations(preset):
    config = PRESETS[preset]()
    assert config.preset == preset
    assert TrainConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    assert config.micro_batches(2) >= 1


def test_configuration_survives_json():
    config = TrainConfig(
        data=(Path("a"), Path("b")), keep_full_precision=("*.wte.*",), folder=Path("r"), model=None
    )
    assert TrainConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"zebra": 1}, "unknown field 'zebra': it is no option of qsdp train"),
        ({"stepz": 1}, "unknown field 'stepz'; did you mean steps?"),
        ({"steps": "12"}, '--steps must be an integer, got "12"'),
        ({"steps": 1.0}, "--steps must be an integer, got 1.0"),
        ({"lr": None}, "--lr must be a number, got null"),
        ({"micro_batch_size": "2"}, '--micro-batch-size must be an integer, or null, got "2"'),
        ({"export": "all"}, '--export must be one of best, decoded, master, none, got "all"'),
        ({"data": "a.txt"}, '--data must be a list of texts, got "a.txt"'),
        ({"folder": 3}, "--folder must be a text, or null, got 3"),
    ],
)
def test_a_field_of_another_type_is_named(field, message):
    with pytest.raises(ValueError) as error:
        TrainConfig.from_json(field)
    assert message in str(error.value)


def test_flags_override_the_preset():
    config = parse(["--preset", "gpt2-350m", "--lr", "1e-4", "--data", "a", "b"])
    assert (config.width, config.lr, config.steps) == (1024, 1e-4, 13400)
    assert config.data == (Path("a"), Path("b"))


def test_resume_takes_the_configuration_of_the_run(tmp_path):
    """`--resume` needs no other flag than the run folder; a flag that is given wins."""
    (tmp_path / "config.json").write_text(json.dumps(TrainConfig(width=96, lr=1e-4).to_json()))
    config = parse(["--folder", str(tmp_path), "--lr", "0.5", "--resume"])
    assert (config.width, config.lr, config.resume) == (96, 0.5, "latest")
    assert parse(["--folder", str(tmp_path), "--resume", "x/step-1"]).resume == "x/step-1"
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is damaged"):
        parse(["--folder", str(tmp_path), "--resume"])


def test_learning_rate_warms_up_and_follows_a_cosine():
    config = TrainConfig(lr=1.0, warmup_steps=10, steps=110, final_lr_fraction=0.1)
    assert learning_rate(config, 1) == pytest.approx(0.1)
    assert learning_rate(config, 10) == 1.0
    assert learning_rate(config, 60) == pytest.approx(0.55)
    assert learning_rate(config, 110) == pytest.approx(0.1)
    assert learning_rate(TrainConfig(lr=1.0, warmup_steps=0, steps=1), 1) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--comm", "w9g8"], "--comm: unknown preset 'w9g8'"),
        (["--comm", "w8g88"], "; did you mean w8g8?"),
        (["--comm", "nothere.json"], "--comm: there is no file nothere.json"),
        (["--comm", "{"], "--comm: { holds no JSON"),
        (["--nproc", "2", "--ranks-per-node", "3"], "--ranks-per-node must divide the ranks, 2"),
        (["--data", "nowhere.txt"], "--data: there is no file nowhere.txt"),
        (["--nproc", "3"], "--batch-size must be a multiple of"),
        (["--model", "nowhere"], "--model: nowhere is no folder with a config.json"),
        (["--tokenizer", "nowhere"], "--tokenizer: there is no file or folder nowhere"),
        (["--dataset", "c4"], "--dataset needs --tokenizer"),
        (["--resume"], "--resume finds no complete checkpoint in"),
        (["--resume", "nowhere"], "--resume nowhere is no complete checkpoint"),
    ],
)
def test_bad_use_is_one_line_before_any_rank_starts(flags, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("qsdp.trainer.launch.launch", None)
    assert main(["train", *flags]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_not_overwritten_by_accident(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    assert main(["train", "--folder", str(tmp_path)]) == 1
    assert "already holds a run; --resume continues it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b"[1]", "a.json must hold a JSON object of QSDPConfig's fields"),
        ("a.json", b"{", "a.json holds no JSON"),
        ("a.json", b"\xff", "a.json is not UTF-8 text"),
        ("a.json", b'{"bits": 4}', "--comm a: unknown field 'bits'"),
        ("a.txt", b"{}", "the name of a file must end with .json, got "),
    ],
)
def test_bad_file_for_comm_names_flag_and_file(tmp_path, capsys, name, content, message):
    (tmp_path / name).write_bytes(content)
    flags = ["--comm", str(tmp_path / name), "--folder", str(tmp_path / "run")]
    assert main(["train", *flags]) == 1
    error = capsys.readouterr().err
    assert "--comm" in error and message in error and error.count("\n") == 1


def write_description(run, *, step):
    """Of a checkpoint, what is read before a run goes on."""
    path = run / "checkpoints" / f"step-{step:08d}"
    path.mkdir(parents=True)
    description = checkpoint.Description(step, 1.0, {}, {}, "", [{}], 1)._asdict()
    content = {"format": checkpoint.FORMAT, **description, "files": {}}
    (path / "checkpoint.json").write_text(json.dumps(content))


@pytest.mark.parametrize(("step", "result"), [(261, False), (190, True)])
def test_nothing_to_train_names_the_step_of_the_checkpoint(tmp_path, capsys, step, result):
    """Further than --steps; or just there, with the results written, too."""
    write_description(tmp_path, step=step)
    (tmp_path / "config.json").write_text("{}")
    if result:
        (tmp_path / "result.json").write_text("{}")
    assert main(["train", "--folder", str(tmp_path), "--steps", "190", "--resume"]) == 1
    error = capsys.readouterr().err
    assert f"is at step {step} and --steps is 190; raise --steps above {step}" in error


@pytest.mark.parametrize("flags", [[], ["--overwrite"], ["--resume"]])
def test_two_runs_do_not_share_a_folder(tmp_path, capsys, monkeypatch, flags):
    """The second is told by whom it is in use, and touches nothing; the lock ends with its
    holder."""
    monkeypatch.setattr("qsdp.trainer.launch.launch", lambda *_: 0)
    write_description(tmp_path, step=1)
    code = "import sys; from pathlib import Path; from qsdp.trainer.lock import hold\n"
    code += "held = hold(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdout.readline() == b"held\n"
    assert main(["train", "--folder", str(tmp_path), *flags]) == 1
    error = capsys.readouterr().err
    here = f"{tmp_path} is in use by process {other.pid} on {socket.gethostname()}"
    assert here in error and "another --folder" in error and error.count("\n") == 1
    other.kill()
    other.communicate()
    assert main(["train", "--folder", str(tmp_path), *flags]) == 0


def test_folder_that_is_a_file(tmp_path, capsys):
    (tmp_path / "run").write_text("")
    assert main(["train", "--folder", str(tmp_path / "run")]) == 1
    assert "--folder: " in capsys.readouterr().err


def test_unknown_command_and_help(capsys):
    assert main(["trian"]) == 2
    assert "no command 'trian'; did you mean train?" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert "report" in capsys.readouterr().out


# ---- the model


@pytest.fixture
def small_tokenizer(tmp_path):
    return load_tokenizer(train_tokenizer(Text(["the old king"], []), 300, tmp_path))


def test_model_folder_is_read_without_running_code(tmp_path, small_tokenizer):
    """Safetensors are read; weights that only unpickling could read are refused."""
    shape = {"layers": 1, "width": 8, "heads": 1, "vocab_size": 300, "sequence_length": 16}
    model = build_model(TrainConfig(**shape), small_tokenizer)
    model.save_pretrained(tmp_path / "model")
    config = TrainConfig(**shape, model=tmp_path / "model", seed=1)
    again = build_model(config, small_tokenizer)
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)
    with pytest.raises(ValueError, match="--sequence-length must be at most 16"):
        build_model(replace(config, sequence_length=17), small_tokenizer)
    (tmp_path / "model" / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(ValueError, match="--model .* cannot be read"):
        build_model(config, small_tokenizer)


def test_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path, small_tokenizer):
    GPT2LMHeadModel(GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=1)).save_pretrained(
        tmp_path / "model"
    )
    with pytest.raises(ValueError, match="the tokenizer has .* tokens, the model 8"):
        build_model(TrainConfig(model=tmp_path / "model"), small_tokenizer)


# ---- checkpoints, in one process


@pytest.fixture
def lone_rank(tmp_path):
    """A process group of this process only."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def small_run(width=4, steps=1):
    """A model with tied weights and an optimizer that has taken `steps` steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, width))
    model[1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(2, width)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def save(folder, model, optimizer, step, keep=2):
    description = checkpoint.Description(
        step=step,
        elapsed_s=1.5,
        config={},
        parameters=shapes(model),
        tokenizer="abc",
        data_states=[{}],
        num_ranks=1,
    )
    return checkpoint.save_checkpoint(folder, model, optimizer, description, keep=keep)


def load(path, model, optimizer, tokenizer="abc"):
    return checkpoint.load_checkpoint(
        path, model, optimizer, parameters=shapes(model), tokenizer=tokenizer
    )


def shapes(model):
    return {name: list(parameter.shape) for name, parameter in model.named_parameters()}


def test_checkpoint_restores_model_and_optimizer(tmp_path, lone_rank):
    """Bit for bit, ties kept; only the last ones are kept on disk."""
    model, optimizer = small_run(steps=3)
    for step in (1, 2, 3):
        path = save(tmp_path, model, optimizer, step)
    assert [p.name for p in checkpoint.complete_checkpoints(tmp_path)] == [
        "step-00000002",
        "step-00000003",
    ]
    other, other_optimizer = small_run(steps=1)
    description = load(path, other, other_optimizer)
    assert (description.step, description.elapsed_s) == (3, 1.5)
    assert other[0].weight is other[1].weight
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        for name, value in optimizer.state[mine].items():
            assert torch.equal(value, other_optimizer.state[theirs][name])


def test_a_last_checkpoint_that_fails_does_not_keep_from_the_results(monkeypatch):
    said = []

    def fail(*_):
        raise SharedError("disk full")

    monkeypatch.setattr(loop, "_save", fail)
    loop._save_last(SimpleNamespace(say=said.append), None)
    assert said == ["warning: disk full; going on to the results"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"comm": '{"name": "a", "exceptions": {"*.x": null}}'}, "--comm a: .*'\\*.x' matches no"),
        ({"keep_full_precision": ("*.x",)}, "--keep-full-precision: '\\*.x' matches no parameter"),
    ],
)
def test_pattern_that_matches_nothing_names_its_flag(lone_rank, fields, message):
    model = torch.nn.Linear(64, 64)
    fully_shard(model)
    with pytest.raises(ValueError, match=message):
        quantize_communication(model, TrainConfig(**fields))


@pytest.mark.parametrize("prefetch", [True, False])
def test_prefetching_gathers_each_block_while_the_one_before_computes(lone_rank, prefetch):
    config = TrainConfig(layers=3, width=8, heads=2, vocab_size=16, prefetch=prefetch)
    model = new_model(config, 16, eos_token_id=0)
    shard(model, config, Ranks(0, 1, torch.device("cpu")))
    blocks = list(model.transformer.h)
    for module, following in zip([model, *blocks], [*blocks, None], strict=True):
        states = module._get_fsdp_state()._states_to_forward_prefetch
        wanted = prefetch and following is not None
        assert states == ([following._get_fsdp_state()] if wanted else [])
        assert module._get_fsdp_state()._fsdp_param_group.unshard_async_op == prefetch


def test_checkpoint_holds_no_pickle(tmp_path, lone_rank):
    """Reading must not run code, so there is safetensors and JSON only."""
    path = save(tmp_path, *small_run(), 1)
    assert {file.suffix for file in path.iterdir()} == {".safetensors", ".json"}


@pytest.mark.parametrize("moment", ["save", "_checksums", "_complete"])
def test_crash_while_saving_leaves_the_last_checkpoint_whole(
    tmp_path, lone_rank, monkeypatch, moment
):
    """Whatever it does not live to do, a crashed save leaves nothing that a reader takes."""
    model, optimizer = small_run()
    good = save(tmp_path, model, optimizer, 1)

    def crash(*args, **kwargs):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, moment, crash)
        with pytest.raises(ValueError, match="disk full"):
            save(tmp_path, model, optimizer, 2)
    assert checkpoint.find_checkpoint("latest", tmp_path) == good
    assert load(good, model, optimizer).step == 1
    save(tmp_path, model, optimizer, 3)
    assert sorted(p.name for p in tmp_path.glob("step*")) == ["step-00000001", "step-00000003"]


def _truncate(file):
    file.write_bytes(file.read_bytes()[:-1])


def _flip(file):
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def _field(name, value):
    def write(file):
        file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))

    return write


@pytest.mark.parametrize(
    ("damage", "pattern", "message"),
    [
        (Path.unlink, "*.safetensors", "safetensors is missing; resume from another"),
        (_truncate, "*.safetensors", "bytes, .* were written"),
        (_flip, "*.safetensors", "safetensors is damaged: its CRC-32 is not"),
        (_truncate, "*.json", "checkpoint.json is damaged"),
        (lambda f: f.write_text('{"format": 3}'), "*.json", "it lacks the field 'step'"),
        (lambda f: f.write_text('{"format": 9}'), "*.json", "format is 9, this version .* reads 3"),
        (lambda f: f.write_text("[]"), "*.json", "checkpoint.json is damaged: it holds no JSON ob"),
        (_field("step", "2"), "*.json", "checkpoint.json is damaged: step is '2'"),
        (_field("files", None), "*.json", "checkpoint.json is damaged: files is None"),
    ],
)
def test_damaged_checkpoint_is_named_and_nothing_is_loaded(
    tmp_path, lone_rank, damage, pattern, message
):
    model, optimizer = small_run(steps=2)
    path = save(tmp_path, model, optimizer, 2)
    damage(next(path.glob(pattern)))
    other, other_optimizer = small_run(steps=1)
    before = other[0].weight.clone()
    with pytest.raises(ValueError, match=message) as error:
        load(path, other, other_optimizer)
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    assert torch.equal(other[0].weight, before)


def test_checkpoint_of_another_model_or_tokenizer_is_refused(tmp_path, lone_rank):
    path = save(tmp_path, *small_run(), 1)
    with pytest.raises(ValueError, match=r"another model: parameter 0.bias has shape \[4\] there"):
        load(path, *small_run(width=8))
    with pytest.raises(ValueError, match="another tokenizer"):
        load(path, *small_run(), tokenizer="xyz")


# ---- runs of two ranks; each costs about ten seconds, so they are few


def command(run, *flags):
    return [sys.executable, "-m", "qsdp", "train", "--folder", str(run), *flags]


def small_flags(text_file, *flags):
    return [
        "--nproc", "2", "--data", str(text_file), "--layers", "2", "--width", "66", "--heads", "2",
        "--vocab-size", "300", "--sequence-length", "32", "--batch-size", "8", "--dropout", "0.1",
        "--warmup-steps", "2", "--micro-batch-size", "2", "--eval-windows", "9", "--log-every", "1",
        "--final-eval-windows", "21", "--prefetch", *flags,
    ]  # fmt: skip


def environment():
    """One thread a rank, as the launcher sets on two cores; nothing of an outer launcher."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
    return {k: v for k, v in os.environ.items() if k not in names} | {"OMP_NUM_THREADS": "1"}


def finish(process, timeout=60):
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def start(*arguments):
    return subprocess.Popen(
        command(*arguments),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def checkpoint_tensors(run, step):
    files = sorted((run / "checkpoints" / f"step-{step:08d}").glob("*.safetensors"))
    assert len(files) == 2, "each rank writes its shard"
    return [load_file(file) for file in files]


STATEFUL = {
    "weights": {
        "differences": {"bits": 4, "rounding": "nearest"},
        "kept": {"bits": 8, "rounding": "nearest"},
    },
    "gradients": {
        "feedback": {
            "learned": {"bits": 4, "rounding": "nearest"},
            "schedule": {"first_step": 1, "every": 2},
        }
    },
}


@pytest.mark.ranks
@pytest.mark.timeout(150)
def test_resumed_run_equals_an_uninterrupted_one(tmp_path, text_file):
    """Bit for bit, with differences, learned levels, error feedback, dropout and gradient
    accumulation: model, optimizer, losses.

    The exported model is the one that the validation measured.
    """
    comm = tmp_path / "stateful.json"
    comm.write_text(json.dumps(STATEFUL))
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    flags = small_flags(text_file, "--steps", "6", "--checkpoint-every", "3", "--eval-every", "2")
    status, out, err = finish(start(whole, *flags, "--comm", str(comm), "--export", "decoded"))
    assert status == 0, err
    assert "step 6/6" in out and "validation perplexity" in out
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step-00000006")
    shutil.rmtree(resumed / "model")
    status, out, err = finish(start(resumed, "--nproc", "2", "--resume"))
    assert status == 0, err
    assert "resumed from" in out and "step 3/6" not in out

    for mine, theirs in zip(
        checkpoint_tensors(whole, 6), checkpoint_tensors(resumed, 6), strict=True
    ):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    records, again = (
        [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (whole, resumed)
    )
    for name in ("step", "loss", "lr", "grad_norm", "valid_loss"):
        assert [r.get(name) for r in records] == [r.get(name) for r in again]
    sent, sent_again = (
        {r["step"]: r["sent"] for r in rs if "sent" in r} for rs in (records, again)
    )
    assert sent == sent_again
    check_export(whole, json.loads((whole / "result.json").read_text()))


def check_export(run, result):
    """The folder loads with transformers and holds the weights that it says."""
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    about = json.loads((run / "model" / "qsdp.json").read_text())
    assert about["weights"] == result["exported"] == "decoded"
    assert "**decoded** weights" in (run / "model" / "README.md").read_text()
    assert result["valid_loss_decoded"] != result["valid_loss_master"]
    assert 8 < result["ratio"] < 16 and result["median_step"]["network_s"] > 0
    masters = {}
    for part in checkpoint_tensors(run, 6):
        for name, tensor in part.items():
            masters.setdefault(name, []).append(tensor)
    weight = model.transformer.h[0].mlp.c_fc.weight
    master = torch.cat(masters["model.transformer.h.0.mlp.c_fc.weight"])
    # Kept in 8 bits a block of weights has 256 values at most, which the masters do not.
    assert 0 < (weight - master).abs().max() < (master.max() - master.min()) / 100
    assert len(weight.flatten()[:1024].unique()) <= 256
    assert exported_loss(model, tokenizer, run) == pytest.approx(
        result["valid_loss_decoded"], rel=1e-6
    )
    ids = tokenizer("the old king", return_tensors="pt")
    assert tokenizer.decode(model.generate(**ids, max_new_tokens=4, do_sample=False)[0])


def exported_loss(model, tokenizer, run):
    """Validation loss of the exported model, by transformers alone."""
    config = TrainConfig.from_json(json.loads((run / "config.json").read_text()))
    ids = encode(read_text(config).valid[0], tokenizer)
    starts = validation_starts(len(ids), config.sequence_length, config.final_eval_windows)
    batch = windows(ids, starts, config.sequence_length)
    with torch.no_grad():
        return token_losses(model.eval(), batch).double().mean().item()


def wait_for_step(run, step, process, timeout=50):
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and process.poll() is None:
        metrics = run / "metrics.jsonl"
        if metrics.is_file() and metrics.read_text().count('"loss"') >= step:
            return
        time.sleep(0.1)
    raise AssertionError(f"no step {step}: {finish(process)}")


@pytest.mark.ranks
def test_interrupt_saves_and_leaves_cleanly(tmp_path, text_file, capsys):
    """Ctrl-C: all ranks stop after the same step, the user is told how to go on, no traceback.

    Until then the folder is this run's alone.
    """
    run = tmp_path / "king's run"
    process = start(run, *small_flags(text_file, "--steps", "100000", "--checkpoint-every", "0"))
    wait_for_step(run, 2, process)
    assert main(["train", "--folder", str(run), "--overwrite"]) == 1
    assert "is in use by process" in capsys.readouterr().err
    process.send_signal(signal.SIGINT)
    status, out, err = finish(process)
    assert status == 128 + signal.SIGINT
    assert f"continue with: qsdp train --folder {shlex.quote(str(run))} --resume" in out
    assert "Traceback" not in out + err
    (saved,) = checkpoint.complete_checkpoints(run / "checkpoints")
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert checkpoint.read_description(saved).step == last["step"]


@pytest.mark.ranks
def test_what_fails_after_training_is_done_again(tmp_path, text_file):
    """Without --checkpoint-every, too: here the export fails, for a file is in its place."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "model").write_text("not a folder")
    flags = small_flags(text_file, "--steps", "3", "--checkpoint-every", "0", "--eval-every", "0")
    status, _, err = finish(start(run, *flags))
    assert status == 1 and err.count("qsdp train: error") == 1 and "Traceback" not in err
    assert not (run / "result.json").exists()
    (run / "model").unlink()
    status, out, err = finish(start(run, "--resume"))
    assert status == 0, err
    assert "step 3/3  loss" not in out and "validation perplexity" in out
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3, 3]
    assert json.loads((run / "result.json").read_text())["steps"] == 3
    assert (run / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("exit_codes", "rank"),
    [
        ((1, -signal.SIGTERM), 0),  # the launcher ended rank 1, which still ran
        ((-signal.SIGTERM, 3), 1),
        ((1, -signal.SIGKILL), 1),  # rank 0 failed because it lost rank 1
        ((-signal.SIGTERM, -signal.SIGKILL), 1),
        ((2, 1), 0),
    ],
)
def test_the_launcher_blames_the_rank_that_failed_first(exit_codes, rank):
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    failures = {i: ProcessFailure(i, 100 + i, code, "") for i, code in enumerate(exit_codes)}
    for i, failure in failures.items():
        failure.timestamp = 5 + i
    assert _cause(failures)[0] == rank


@pytest.mark.ranks
def test_rank_that_dies_ends_the_run_and_leaves_the_checkpoint(tmp_path, text_file):
    """The others do not wait for it, and the exit status tells of the signal."""
    run = tmp_path / "run"
    process = start(run, *small_flags(text_file, "--steps", "100000", "--checkpoint-every", "2"))
    wait_for_step(run, 5, process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ranks = [pid for pid in children if b"LOCAL_RANK" in Path(f"/proc/{pid}/environ").read_bytes()]
    assert len(ranks) == 2
    os.kill(int(ranks[1]), signal.SIGKILL)
    status, _, err = finish(process)
    assert status == 128 + signal.SIGKILL
    assert "was ended by SIGKILL" in err and "Traceback" not in err
    assert checkpoint.read_description(checkpoint.find_checkpoint("latest", run / "checkpoints"))


@pytest.mark.ranks
def test_error_on_every_rank_is_one_line(tmp_path, text_file):
    """What only the ranks can find out: here, a pattern that matches no parameter. The folder is
    not taken for a run afterwards."""
    flags = small_flags(text_file, "--keep-full-precision", "*.nothing")
    status, out, err = finish(start(tmp_path / "run", *flags))
    assert status == 1 and not (tmp_path / "run" / "config.json").exists()
    assert "--keep-full-precision: '*.nothing' matches no parameter" in err
    assert err.count("qsdp train: error") == 1
    assert "Traceback" not in out + err
