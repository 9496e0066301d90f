"""Training: set up a run, take its steps, finish it. Every rank calls every function here."""

from __future__ import annotations

import math
import shlex
import shutil
from pathlib import Path
from typing import NamedTuple, TextIO

import torch
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from qsdp.agreement import all_gather_json
from qsdp.qat import FakeQuantization
from qsdp.trainer.auto import DECISION, decide_communication
from qsdp.trainer.boards import TENSORBOARD, WANDB, forget, open_boards
from qsdp.trainer.check import check
from qsdp.trainer.checkpoint import (
    Description,
    find_checkpoint,
    save_checkpoint,
)
from qsdp.trainer.comm import (
    comm_config,
    freeze_second_moment,
    quantize_communication,
    quantizes_weights,
    with_warmup,
)
from qsdp.trainer.config import TrainConfig
from qsdp.trainer.data import Data, prepare_data, vocabulary_digest
from qsdp.trainer.evaluate import master_validation_loss, validation_loss
from qsdp.trainer.export import Weights, export_model
from qsdp.trainer.launch import STOP_FILE
from qsdp.trainer.local import (
    Local,
    averaged,
    comm_state,
    describe,
    make_local,
)
from qsdp.trainer.lock import hold
from qsdp.trainer.metrics import METRICS, RESULT, Metrics, read_metrics, step_medians, write_json
from qsdp.trainer.model import (
    Count,
    build_model,
    build_optimizer,
    count_parameters,
    shard,
)
from qsdp.trainer.quantized import quantize_layers, travels_exactly
from qsdp.trainer.ranks import Ranks, SharedError, on_rank_zero, process_group, together
from qsdp.trainer.resume import Progress, continue_run, shapes, warnings_on_a_line
from qsdp.trainer.step import Training, take_step
from qsdp.trainer.stop import StopRequest


class Run(NamedTuple):
    """What does not change while a run trains."""

    config: TrainConfig
    ranks: Ranks
    data: Data
    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    metrics: Metrics | None
    """On rank 0 only."""
    local: Local | None
    """With --sync-every."""
    fake: FakeQuantization | None
    """With --fake-quantize."""

    @property
    def training(self) -> Training:
        config, ranks, data, model, optimizer, _, local, fake = self
        return Training(config, ranks, model, optimizer, data.batches, local, fake)

    def say(self, text: str) -> None:
        if self.metrics is not None:
            self.metrics.say(text)


def train(config: TrainConfig) -> None:
    """Train on this rank, from start or checkpoint to the exported model or an interruption."""
    disable_progress_bar()  # of transformers, which would cut into our own
    stop = StopRequest(config.run_folder / STOP_FILE)
    with process_group(config.device, config.timeout) as ranks:
        on_rank_zero(lambda: check(config, ranks.num_ranks))
        lock: list[TextIO] = []  # on rank 0, until training ends
        resume = _prepare_folder(config, lock)
        data = prepare_data(config, ranks)
        model = together(lambda: build_model(config, data.tokenizer))
        count = count_parameters(model)
        fake = together(lambda: quantize_layers(model, config))
        mesh = shard(model, config, ranks)
        optimizer = build_optimizer(model, config)
        config = together(lambda: decide_communication(model, config, resume))
        config = with_warmup(config, comm_config(config))
        with warnings_on_a_line(ranks):
            together(lambda: quantize_communication(model, config, fake))
        together(lambda: freeze_second_moment(optimizer, config))
        start, local = Progress(0, 0.0), None
        if resume is None:
            local = together(lambda: make_local(model, optimizer, mesh, config, 0))
        else:
            start, local = continue_run(resume, config, ranks, data, model, optimizer, mesh, fake)
        on_rank_zero(lambda: _write_config(config))
        metrics = together(lambda: _open_metrics(config, ranks, start))
        run = Run(config, ranks, data, model, optimizer, metrics, local, fake)
        run.say(_headline(run, count, resume))
        try:
            end = _take_steps(run, start, stop)
            if end.step == config.steps:
                stop.release()
                _finish(run, end, count)
        finally:
            if metrics is not None:
                metrics.close()


def _prepare_folder(config: TrainConfig, lock: list[TextIO]) -> Path | None:
    """Make the run folder, empty for a fresh run; returns the checkpoint to resume from.

    Args:
        lock: gets what keeps other processes out of the folder, on rank 0.
    """
    folder = config.run_folder

    def prepare() -> str | None:
        resume = find_checkpoint(config.resume, folder / "checkpoints") if config.resume else None
        lock.append(hold(folder))
        if resume is None:
            quantized_folders = (path.name for path in folder.glob("model-int[2-8]"))
            # By name: --folder may point at a folder that holds more than a run.
            for name in ("checkpoints", "data", "model", TENSORBOARD, WANDB, *quantized_folders):
                shutil.rmtree(folder / name, ignore_errors=True)
            forget(folder)
            files = (folder / name for name in ("config.json", METRICS, DECISION))
            for path in (*files, *folder.glob("traceback-*")):
                path.unlink(missing_ok=True)
        return None if resume is None else str(resume)

    resume = on_rank_zero(prepare)
    return None if resume is None else Path(resume)


def _write_config(config: TrainConfig) -> None:
    """From here on the folder is this run's; a run that failed to start has not touched it."""
    # It says what the run is, not how it was started: --config takes it, too.
    started = {"overwrite": False, "resume": None}
    write_json(config.run_folder / "config.json", config.to_json() | started)
    (config.run_folder / RESULT).unlink(missing_ok=True)


def _open_metrics(config: TrainConfig, ranks: Ranks, start: Progress) -> Metrics | None:
    if ranks.rank != 0:
        return None
    return Metrics(
        config.run_folder,
        total_steps=config.steps,
        resume_step=start.step,
        log_every=config.log_every,
        boards=open_boards(config, config.run_folder, start.step),
    )


def _headline(run: Run, count: Count, resume: Path | None) -> str:
    config = run.config
    source = f", resumed from {resume}" if resume is not None else ""
    trained = "" if config.lora is None else f", {count.trained:,} of them trained"
    if config.fake_quantize is not None:
        exact = ", sent as they are" * travels_exactly(config)
        trained = f", linear layers in {config.fake_quantize} bits{exact}"
    replicas = "" if config.replicate == 1 else f", {config.replicate} replicas"
    num_ranks = run.ranks.num_ranks
    return (
        f"{config.run_folder}: {count.parameters:,} parameters{trained}, {config.comm_name}, "
        f"{num_ranks} rank{'s' * (num_ranks > 1)} on {run.ranks.device.type}{replicas}"
        f"{describe(config)}, "
        f"{config.steps} steps of {config.batch_size} x {config.sequence_length} tokens{source}"
    )


def _take_steps(run: Run, progress: Progress, stop: StopRequest) -> Progress:
    """Train until the last step or until any rank was asked to stop."""
    config = run.config
    while progress.step < config.steps:
        step = progress.step + 1
        result = take_step(run.training, step, stop.requested)
        elapsed_s = progress.elapsed_s + result.metrics["step_s"]
        record = result.metrics | {"elapsed_s": elapsed_s}
        if result.met and not math.isfinite(record["loss"]):
            raise SharedError(
                f"the loss of step {step} is {record['loss']}; lower --lr, or --resume from "
                f"{config.run_folder / 'checkpoints'} with other settings"
            )
        progress = Progress(step, elapsed_s)
        if run.metrics is not None:
            run.metrics.step(record)
        last = step == config.steps
        if result.stopping and not last:
            _save(run, progress)
            (config.run_folder / STOP_FILE).unlink(missing_ok=True)
            run.say(
                f"stopped at step {step}, checkpoint saved; continue with: qsdp train "
                f"--folder {shlex.quote(str(config.run_folder))} --resume"
            )
            return progress
        if last:
            _save_last(run, progress)
        elif config.checkpoint_every and step % config.checkpoint_every == 0:
            _save(run, progress)
        if config.eval_every and step % config.eval_every == 0 and not last:
            with averaged(run.local):
                loss = validation_loss(
                    run.model, run.data.valid, config, run.ranks, limit=config.eval_windows
                )
            _record_validation(run, progress, loss)
    return progress


def _save(run: Run, progress: Progress) -> None:
    description = Description(
        step=progress.step,
        elapsed_s=progress.elapsed_s,
        config=run.config.to_json(),
        parameters=shapes(run.model),
        tokenizer=vocabulary_digest(run.data.tokenizer),
        data_states=all_gather_json(run.data.batches.state()),
        num_ranks=run.ranks.num_ranks,
    )
    save_checkpoint(
        run.config.run_folder / "checkpoints",
        run.model,
        run.optimizer,
        description,
        keep=run.config.keep_checkpoints,
        comm=comm_state(run.model, run.local),
        local=run.local,
    )


def _save_last(run: Run, progress: Progress) -> None:
    """Save before the last validation and the export, so that they can be done again.

    Where that fails they go on: they are what the run is for, and no step is left to lose.
    """
    try:
        _save(run, progress)
    except SharedError as error:
        run.say(f"warning: {error}; going on to the results")


def _record_validation(run: Run, progress: Progress, loss: float) -> None:
    if run.metrics is not None:
        run.metrics.validation(
            {
                "step": progress.step,
                "valid_loss": loss,
                "valid_perplexity": math.exp(loss),
                "elapsed_s": progress.elapsed_s,
            }
        )


def _finish(run: Run, end: Progress, count: Count) -> None:
    """Validate decoded and master weights, export the model, write result.json."""
    config = run.config
    arguments = (run.model, run.data.valid, config, run.ranks)
    decoded = master = validation_loss(*arguments, limit=config.final_eval_windows)
    if quantizes_weights(config):
        master = master_validation_loss(*arguments, limit=config.final_eval_windows, fake=run.fake)
    weights: Weights = "decoded" if config.export == "decoded" else "master"
    # Adapters are for the model as it is on disk, and so are measured together with that.
    better = decoded < master or run.fake is not None
    if config.export == "best" and better and config.lora is None:
        weights = "decoded"
    result = {
        "comm": config.comm_name,
        "preset": config.preset,
        "parameters": count.parameters,
        "trained_parameters": count.trained,
        "num_ranks": run.ranks.num_ranks,
        "device": run.ranks.device.type,
        "steps": end.step,
        "tokens": end.step * config.batch_size * config.sequence_length,
        "seed": config.seed,
        "valid_loss_decoded": decoded,
        "valid_loss_master": master,
        "valid_perplexity_decoded": math.exp(decoded),
        "valid_perplexity_master": math.exp(master),
        "fake_quantize": config.fake_quantize,
        "exported": None if config.export == "none" else weights,
        "train_s": end.elapsed_s,
    }
    if run.ranks.rank == 0:
        medians = step_medians(read_metrics(config.run_folder / METRICS))
        ratio = medians["stock_sent"] / medians["sent"] if medians.get("sent") else 1.0
        result |= {"median_step": medians, "ratio": ratio}
    if config.export != "none":
        export_model(
            config.run_folder / "model",
            run.model,
            run.data.tokenizer,
            run.ranks,
            weights=weights,
            config=config,
            result=result,
            fake=run.fake,
        )
    on_rank_zero(lambda: write_json(config.run_folder / RESULT, result))
    _record_validation(run, end, decoded)
    what = f"{weights} weights" if config.lora is None else "adapters"
    run.say(
        f"validation perplexity {math.exp(decoded):.3f} decoded, {math.exp(master):.3f} masters; "
        f"results in {config.run_folder / RESULT}"
        + (f", {what} in {config.run_folder / 'model'}" if result["exported"] else "")
    )
