"""Hugging Face Accelerate with its FSDP2 plugin: one call after `accelerator.prepare`.

torchrun --nproc-per-node 2 examples/accelerate_fsdp2.py --comm w8g8

Accelerate offers FSDP on accelerators only; plain.py, ddp.py and lightning_fsdp2.py run on CPUs.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from transformers import LlamaConfig, LlamaForCausalLM

import qsdp


def train(comm: str, steps: int = 30) -> dict[str, object]:
    """Learn this file, byte by byte. ``comm`` is a preset, or "stock" for no qsdp at all."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    accelerator = Accelerator(fsdp_plugin=plugin, cpu=not torch.accelerator.is_available())
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    if comm != "stock":
        qsdp.apply_qsdp(model, comm)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    generator = torch.Generator().manual_seed(accelerator.process_index)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(text) - 64, (8,), generator=generator)
        ids = torch.stack([text[start : start + 64] for start in starts]).to(accelerator.device)
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    stats = qsdp.comm_stats(model) if qsdp.is_quantized(model) else qsdp.CommStats()
    return {"losses": losses, "sent": stats.sent, "stock_sent": stats.stock_sent}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--comm", default="w8g8", help="w{1..8|32}g{1..8|32}, or stock")
    args = parser.parse_args()
    if not torch.accelerator.is_available():
        raise SystemExit("Accelerate offers FSDP on accelerators only: there is none here")
    result = train(args.comm)
    if Accelerator().is_main_process:
        print(result["losses"][-1], result["sent"], result["stock_sent"])
    Accelerator().end_training()
