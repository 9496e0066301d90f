"""Lightning's ModelParallelStrategy: fully_shard in `configure_model`, then a callback of qsdp.

torchrun --nproc-per-node 2 examples/lightning_fsdp2.py --comm w8g8
"""

import argparse
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from plain import Model
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import qsdp
from qsdp.integrations.lightning import QSDPCallback


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Model()
        self.losses: list[float] = []

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        # Without the callback: qsdp.apply_qsdp(self.model, "w8g8")

    def training_step(self, ids: torch.Tensor, index: int) -> torch.Tensor:
        loss = self.model(ids)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def train(comm: str, steps: int = 30) -> dict[str, object]:
    """Learn this file, byte by byte. ``comm`` is a preset, or "stock" for no qsdp at all."""
    text = torch.tensor(list(Path(__file__).read_bytes()))
    windows = [text[start : start + 65] for start in range(len(text) - 65)]
    trainer = L.Trainer(
        accelerator="auto",
        devices=2,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        callbacks=[] if comm == "stock" else [QSDPCallback(comm)],
        max_steps=steps,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    module = Module()
    trainer.fit(module, DataLoader(windows, batch_size=8))
    numbers = {name: float(value) for name, value in trainer.callback_metrics.items()}
    stats = qsdp.comm_stats(module) if qsdp.is_quantized(module) else qsdp.CommStats()
    return {
        "losses": module.losses,
        "sent": stats.sent,
        "stock_sent": stats.stock_sent,
        "weight_error": numbers.get("qsdp_weight_error"),
        "main": trainer.is_global_zero,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--comm", default="w8g8", help="w{1..8|32}g{1..8|32}, or stock")
    args = parser.parse_args()
    result = train(args.comm)
    if result["main"]:
        print(result["losses"][-1], result["sent"], result["stock_sent"], result["weight_error"])
