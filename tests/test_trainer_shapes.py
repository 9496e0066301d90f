"""`qsdp train` beyond one model on one mesh: replicas, and adapters on a frozen model."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_trainer import exported_loss, finish, start
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from qsdp.cli import main
from qsdp.plan.runs import predict_run, read_run
from qsdp.trainer.comm import comm_config, freeze_second_moment, remembers_alike, with_warmup
from qsdp.trainer.command import parse
from qsdp.trainer.config import TrainConfig
from qsdp.trainer.model import build_model, build_optimizer, count_parameters
from qsdp.trainer.text import Text
from qsdp.trainer.tokenizer import load_tokenizer, train_tokenizer

TINY = {"layers": 2, "width": 66, "heads": 2, "vocab_size": 300, "sequence_length": 32}
SHORT = {"batch_size": 8, "warmup_steps": 2, "eval_windows": 9, "final_eval_windows": 21,
         "log_every": 1, "steps": 4, "checkpoint_every": 2, "eval_every": 0}  # fmt: skip


@pytest.fixture
def tokenizer(tmp_path: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(train_tokenizer(Text(["the old king"], []), 300, tmp_path))


def tensors(run: Path, step: int) -> list[dict[str, torch.Tensor]]:
    """Of each rank's file in a checkpoint."""
    return [
        load_file(file)
        for file in sorted((run / "checkpoints" / f"step-{step:08d}").glob("*.safetensors"))
    ]


def equal(mine: list[dict[str, torch.Tensor]], theirs: list[dict[str, torch.Tensor]]) -> bool:
    return all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(mine, theirs, strict=True)
    )


def resumed_equals(run: Path, copy: Path) -> str:
    """Resume from step 2 of 4 in a copy; returns what it printed."""
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints" / "step-00000004")
    status, out, err = finish(start(copy, "--resume"), timeout=100)
    assert status == 0 and "resumed from" in out and "warning" not in out + err, out + err
    assert equal(tensors(run, 4), tensors(copy, 4))
    ours, theirs = (json.loads((folder / "result.json").read_text()) for folder in (run, copy))
    for name in ("valid_loss_decoded", "valid_loss_master"):
        assert ours[name] == theirs[name]
    return out


# ---- replicas


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--replicate", "3", "--nproc", "4"], "--replicate must divide the ranks, 4, got 3"),
        (["--replicate", "0"], "--replicate must be at least 1, got 0"),
        (
            ["--replicate", "2", "--nproc", "4", "--ranks-per-node", "4"],
            "--ranks-per-node must divide the ranks of a replica, 4 / 2, got 4",
        ),
        (["--comm", "c.json"], "--comm c says how replicas reduce gradients, and there is one"),
        (["--lora", "8"], "--lora needs --model: adapters are trained on a model"),
        (["--lora", "0", "--model", "m"], "--lora must be at least 1, or left out, got 0"),
        (["--lora-alpha", "8"], "--lora-alpha needs --lora RANK"),
        (["--lora-targets", "q_proj"], "--lora-targets needs --lora RANK"),
        (["--lora", "8", "--model", "m", "--export", "decoded"], "--export decoded does not go"),
    ],
)
def test_bad_use_is_one_line(
    flags: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.json").write_text('{"replicas": {"bits": 8}}')
    assert main(["train", *flags]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["c.json"]


def test_a_preset_quantizes_between_replicas_unless_told_not_to() -> None:
    config = comm_config(TrainConfig(comm="w8g4", replicate=2))
    assert config.replicas == config.gradients is not None
    for other in (
        TrainConfig(comm="w8g4"),
        TrainConfig(comm="w8g4", replicate=2, quantize_replicas=False),
        TrainConfig(comm="w8g32", replicate=2),
        TrainConfig(comm='{"preset": "w8g4"}', replicate=2),
    ):
        assert comm_config(other).replicas is None
    given = TrainConfig(comm='{"preset": "w8g8", "replicas": {"bits": 4}}', replicate=2)
    assert comm_config(given).replicas.bits == 4


def test_a_run_keeps_its_warmup_when_it_is_resumed_for_more_steps(tmp_path: Path) -> None:
    """In other bits it does not."""
    config = TrainConfig(comm="bitdp", steps=500)
    run = with_warmup(config, comm_config(config))
    (tmp_path / "config.json").write_text(json.dumps(run.to_json()))
    resume = ["--folder", str(tmp_path), "--resume", "--steps", "5000"]
    more = parse(resume)
    assert more.comm_warmup == 50 and comm_config(more).warmup.steps == 50
    assert with_warmup(more, comm_config(more)) == more
    assert parse([*resume, "--comm-warmup", "9"]).comm_warmup == 9
    other = parse([*resume, "--comm", "w4g4"])
    assert other.comm_warmup is None and with_warmup(other, comm_config(other)) == other


def test_presets_of_systems_follow_the_run() -> None:
    """A tenth of the steps is the warm-up; flat collectives have no inside of a node."""
    config = TrainConfig(comm="bitdp", steps=500, replicate=2)
    comm = comm_config(config)
    assert comm.warmup.steps == 50 and comm.replicas == comm.gradients
    each = replace(config, sync_every_micro_batch=True, micro_batch_size=1, batch_size=8)
    reductions = each.micro_batches(each.nproc)
    each_warmup = comm_config(each).warmup
    assert reductions > 1 and each_warmup is not None
    assert each_warmup.steps == 50 * reductions
    assert comm_config(replace(config, comm_warmup=7)).warmup.steps == 7
    assert comm_config(replace(config, comm_warmup=0)).warmup is None
    with pytest.raises(ValueError, match="--comm-warmup is for presets that begin in more bits"):
        comm_config(TrainConfig(comm="w4g4", comm_warmup=7))
    assert comm_config(TrainConfig(comm="sdp4bit")).inside_node is not None
    assert comm_config(TrainConfig(comm="sdp4bit", ranks_per_node=1)).inside_node is None
    assert comm_config(TrainConfig(comm="sdp4bit", ranks_per_node=2)).inside_node is not None
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))], betas=(0.9, 0.95))
    freeze_second_moment(optimizer, config)
    with pytest.raises(ValueError, match="--freeze-second-moment: .* at_step=90 or a smaller"):
        freeze_second_moment(optimizer, replace(config, freeze_second_moment=9))
    with pytest.raises(ValueError, match="travel with transform='hadamard'"):
        freeze_second_moment(optimizer, TrainConfig(comm="w8g4", freeze_second_moment=90))


def test_what_communication_remembers_belongs_to_its_replicas() -> None:
    """A checkpoint that is older than the flags has one replica."""
    saved = TrainConfig(replicate=2).to_json()
    assert remembers_alike(saved, TrainConfig(replicate=2))
    assert not remembers_alike(saved, TrainConfig(replicate=4))
    del saved["replicate"], saved["quantize_replicas"]
    assert remembers_alike(saved, TrainConfig())


@pytest.mark.ranks
@pytest.mark.timeout(240)
def test_two_replicas_of_two_shards_train_and_resume(tmp_path: Path, text_file: Path) -> None:
    """From a file; resumed bit for bit, with differences of weights on either replica."""
    run = tmp_path / "run"
    file = {**TINY, **SHORT, "nproc": 4, "replicate": 2, "comm": "w4g4", "data": [str(text_file)]}
    (tmp_path / "run.json").write_text(json.dumps(file))
    status, out, err = finish(start(run, "--config", str(tmp_path / "run.json")), timeout=100)
    assert status == 0, err
    assert "4 ranks on cpu, 2 replicas" in out
    assert len(tensors(run, 4)) == 4
    result = json.loads((run / "result.json").read_text())
    assert result["valid_loss_decoded"] < 5.5 and result["ratio"] > 7
    resumed_equals(run, tmp_path / "resumed")


# ---- adapters


def test_adapters_alone_are_trained(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    build_model(TrainConfig(**TINY), tokenizer).save_pretrained(tmp_path / "base")
    config = TrainConfig(**TINY, model=tmp_path / "base", lora=4, lora_targets=("c_attn",))
    model = build_model(config, tokenizer)
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    assert len(trained) == 2 * 2 and all("c_attn.lora_" in name for name in trained)
    assert {value.dtype for value in trained.values()} == {torch.float32}
    frozen = [value for value in model.parameters() if not value.requires_grad]
    assert {value.dtype for value in frozen} == {torch.bfloat16}
    assert count_parameters(model).trained == 2 * 4 * (66 + 3 * 66)
    groups = build_optimizer(model, config).param_groups
    assert sum(len(group["params"]) for group in groups) == 4
    again = build_model(config, tokenizer).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in model.state_dict().items())
    with pytest.raises(ValueError, match="--lora-targets: .*q_proj"):
        build_model(TrainConfig(**TINY, model=tmp_path / "base", lora=4, lora_targets=("q_proj",)),
                    tokenizer)  # fmt: skip


@pytest.mark.ranks
@pytest.mark.timeout(240)
def test_adapters_train_resume_and_are_read_by_peft(
    tmp_path: Path, text_file: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """On a frozen bfloat16 base: checkpoints and exports hold adapters alone, and peft's model has
    the loss that was measured on the masters."""
    from peft import AutoPeftModelForCausalLM

    base, run = tmp_path / "base", tmp_path / "run"
    build_model(TrainConfig(**TINY), tokenizer).save_pretrained(base)
    tokenizer.save_pretrained(base)
    file = {**SHORT, "nproc": 2, "comm": "w4g4", "data": [str(text_file)], "model": str(base),
            "sequence_length": 32, "lora": 16, "lr": 0.01}  # fmt: skip
    (tmp_path / "lora.json").write_text(json.dumps(file))
    status, out, err = finish(start(run, "--config", str(tmp_path / "lora.json")), timeout=100)
    assert status == 0 and f"adapters in {run / 'model'}" in out, err
    for part in tensors(run, 4):
        own = [name for name in part if name.startswith(("model.", "optimizer."))]
        assert own and all("lora_" in name for name in own)
    resumed_equals(run, tmp_path / "resumed")

    result = json.loads((run / "result.json").read_text())
    assert result["ratio"] > 3 and result["exported"] == "master"
    assert "LoRA adapters of rank 16, alpha 32" in (run / "model" / "README.md").read_text()
    assert not (run / "model" / "model.safetensors").exists()
    model = AutoPeftModelForCausalLM.from_pretrained(run / "model", dtype=torch.bfloat16)
    loss = exported_loss(model, AutoTokenizer.from_pretrained(run / "model"), run)
    assert loss == pytest.approx(result["valid_loss_master"], rel=1e-3)
    plain = exported_loss(build_model(TrainConfig(**TINY, model=base), tokenizer), tokenizer, run)
    assert loss < plain - 0.1


# ---- what a run would have taken


def test_a_run_on_slower_links(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Computation and coding as measured, bytes over bandwidth; two lines of 80 columns a link."""
    runs = [write_run(tmp_path / comm, comm) for comm in ("w32g32", "w8g8", "w4g4")]
    flags = ["--runs", *map(str, runs), "--bandwidth", "0.1", "10"]
    assert main(["plan", *flags]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    lines = [line.split("  ") for line in out.splitlines() if line.startswith(("100 M", "10 G"))]
    assert len(lines) == 2 and "as measured here" in out
    assert main(["plan", *flags, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["run"] for row in rows] == ["w32g32", "w8g8", "w4g4"] * 2
    assert rows[0]["speedup"] == rows[3]["speedup"] == 1
    assert rows[2]["speedup"] > rows[1]["speedup"] > 2 > rows[4]["speedup"]
    for row in rows:
        assert row["compute_s"] == pytest.approx(0.23)  # computation and coding
        on_link = row["between_nodes"] * 8e-9 / row["bandwidth_gbps"]
        # What gloo took in memory it takes again, and each message its latency.
        assert 0.04 < row["network_s"] - on_link < 0.05
        assert row["train_s"] == pytest.approx(40 * row["step_s"])


def test_bytes_of_a_run_are_the_planners(tmp_path: Path) -> None:
    """What `make demo` counts: the tiny model on two ranks."""
    found = read_run(write_run(tmp_path / "run", "w8g8"))
    assert predict_run(found, 0.2, 1.0, 50.0).between_nodes == DEMO_SENT


DEMO_SENT = 2956160


@pytest.mark.parametrize(
    ("config", "result", "message"),
    [
        ({"model": "m"}, {}, "trains a --model, and the planner knows the presets' GPT-2 only"),
        ({"replicate": 2}, {}, "has replicas or two levels"),
        ({}, {"device": "cuda"}, "ran on GPUs, where computation hides what the network takes"),
        ({}, {"num_ranks": 1}, "has one rank, and so no network"),
        ({"comm": "auto-8"}, {}, "is damaged or of another version: unknown preset"),
        ({"layers": "x"}, {}, "is damaged or of another version"),
        ({}, None, "holds no finished run: no result.json"),
    ],
)
def test_runs_that_cannot_be_told_of(
    config: dict[str, object],
    result: dict[str, object] | None,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = write_run(tmp_path / "run", "w8g8", config, result)
    if result is None:
        (run / "result.json").unlink()
    assert main(["plan", "--runs", str(run)]) == 1
    error = capsys.readouterr().err
    assert "--runs: " in error and message in error and error.count("\n") == 1


def write_run(
    folder: Path,
    comm: str,
    config: dict[str, object] | None = None,
    result: dict[str, object] | None = None,
) -> Path:
    """A finished run of the tiny preset."""
    folder.mkdir()
    settings = TrainConfig(comm=comm, nproc=2).to_json() | (config or {})
    (folder / "config.json").write_text(json.dumps(settings))
    step = {"step_s": 0.27, "compute_s": 0.2, "encode_s": 0.01, "decode_s": 0.02, "network_s": 0.04}
    found = {"num_ranks": 2, "device": "cpu", "steps": 40, "train_s": 11.0, "median_step": step}
    (folder / "result.json").write_text(json.dumps(found | (result or {})))
    return folder
