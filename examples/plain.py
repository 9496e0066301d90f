"""FSDP2 without a framework, on GPUs where there are any.

torchrun --nproc-per-node 2 examples/plain.py --comm w8g8
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import qsdp


class Model(nn.Module):
    def __init__(self, width: int = 128, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The loss of predicting each of ``ids`` (batch, length) but the first."""
        x = self.embed(ids[:, :-1])
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device, x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(x).transpose(1, 2), ids[:, 1:])


def train(comm: str, steps: int = 30) -> dict[str, object]:
    """Learn this file, byte by byte. ``comm`` is a preset, or "stock" for no qsdp at all."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    text = torch.tensor(list(Path(__file__).read_bytes()))
    torch.manual_seed(0)
    model = Model().to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if comm != "stock":
        qsdp.apply_qsdp(model, comm)  # after the last fully_shard
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
    stats = qsdp.comm_stats(model) if qsdp.is_quantized(model) else qsdp.CommStats()
    return {"losses": losses, "sent": stats.sent, "stock_sent": stats.stock_sent}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--comm", default="w8g8", help="w{1..8|32}g{1..8|32}, or stock")
    args = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
    result = train(args.comm)
    if dist.get_rank() == 0:
        print(result["losses"][-1], result["sent"], result["stock_sent"])
    dist.destroy_process_group()
