"""Hugging Face Trainer with FSDP2: a callback applies qsdp and adds its numbers to the logs.

torchrun --nproc-per-node 2 examples/hf_trainer.py --comm w8g8

Accelerate offers FSDP on accelerators only; plain.py, ddp.py and lightning_fsdp2.py run on CPUs.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from qsdp.integrations.transformers import QSDPCallback


def train(comm: str, steps: int = 30) -> dict[str, object]:
    """Learn this file, byte by byte. ``comm`` is a preset, or "stock" for no qsdp at all."""
    text = list(Path(__file__).read_bytes())
    windows = [text[start : start + 64] for start in range(len(text) - 64)]
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
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                fsdp=True,
                fsdp_config={"transformer_layer_cls_to_wrap": "LlamaDecoderLayer"},
                max_steps=steps,
                per_device_train_batch_size=8,
                learning_rate=1e-3,
                lr_scheduler_type="constant",
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=not torch.accelerator.is_available(),
            ),
            train_dataset=[{"input_ids": window, "labels": window} for window in windows],
            callbacks=[] if comm == "stock" else [QSDPCallback(comm)],
        )
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    sent = sum(entry.get("qsdp_sent_bytes", 0.0) for entry in logs)
    stock = sum(e["qsdp_sent_bytes"] * e["qsdp_ratio"] for e in logs if "qsdp_ratio" in e)
    return {
        "losses": [entry["loss"] for entry in logs],
        "sent": sent,
        "stock_sent": stock,
        "weight_error": logs[-1].get("qsdp_weight_error"),
        "main": trainer.is_world_process_zero(),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--comm", default="w8g8", help="w{1..8|32}g{1..8|32}, or stock")
    args = parser.parse_args()
    if not torch.accelerator.is_available():
        raise SystemExit("Accelerate offers FSDP on accelerators only: there is none here")
    result = train(args.comm)
    if result["main"]:
        print(result["losses"][-1], result["sent"], result["stock_sent"], result["weight_error"])
    torch.distributed.destroy_process_group()
