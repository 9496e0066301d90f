"""DistributedDataParallel with a quantized all-reduce, on GPUs where there are any.

torchrun --nproc-per-node 2 examples/ddp.py --comm w32g8
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from plain import Model
from torch.nn.parallel import DistributedDataParallel

import qsdp


def train(comm: str, steps: int = 30) -> dict[str, object]:
    """Learn this file, byte by byte. ``comm`` is w32g{1..8|32}, or "stock" for no qsdp at all."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    text = torch.tensor(list(Path(__file__).read_bytes()))
    torch.manual_seed(0)
    model = DistributedDataParallel(Model().to(device))
    state = None
    if comm != "stock":
        gradients = qsdp.QSDPConfig.preset(comm).gradients
        feedback = None if gradients is None else qsdp.Feedback(gradients)
        config = qsdp.QSDPConfig(weights=None, gradients=feedback)
        state = qsdp.QuantizedDDPState(model, config, warmup_steps=2)
        model.register_comm_hook(state, qsdp.quantized_ddp_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(text) - 65, (8,), generator=generator)
        ids = torch.stack([text[start : start + 65] for start in starts]).to(device)
        loss = model(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    stats = state.stats() if state is not None else qsdp.CommStats()
    return {"losses": losses, "sent": stats.sent, "stock_sent": stats.stock_sent}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--comm", default="w32g8", help="w32g{1..8|32}, or stock")
    args = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
    result = train(args.comm)
    if dist.get_rank() == 0:
        print(result["losses"][-1], result["sent"], result["stock_sent"])
    dist.destroy_process_group()
