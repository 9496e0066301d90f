"""What `make dist` runs in each clean environment: kernels, OpenMP, three steps on two ranks.

``python -I tests/installed.py native`` where the native kernels must be there, ``reference``
where they cannot be, because a package was built without a compiler.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import qsdp
from qsdp import kernels

WARNING = "were not built"


def train(rank: int, folder: str) -> None:
    """Three steps in w8g8; the loss falls and less is sent than in full precision."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
    mesh = init_device_mesh("cpu", (2,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    qsdp.apply_qsdp(model, "w8g8")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    values = torch.randn(64, 256)
    losses = []
    for _ in range(3):
        loss = (model(values) - values).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0], losses
    if rank == 0:
        print("w8g8, 2 ranks", " ".join(f"{loss:.4f}" for loss in losses))
    dist.destroy_process_group()


def openmp_runtimes() -> set[str]:
    """Files of OpenMP runtimes in this process."""
    files = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    return {file for file in files if "libgomp" in file or "libomp" in file}


def main(wanted: str) -> None:
    place = Path(qsdp.__file__).parent
    assert place.parent.name == "site-packages", f"this is not the installed package: {place}"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        backend = kernels.backend_for(torch.device("cpu"))
    said = [str(each.message) for each in caught if WARNING in str(each.message)]
    print("kernels      ", backend.NAME, *said)
    assert (backend.NAME == "reference", len(said)) == (wanted == "reference",) * 2
    if wanted == "native":
        quantizer = qsdp.Quantizer(8)
        qsdp.encode(torch.randn(1 << 20), quantizer)
        runtimes = openmp_runtimes()
        print("OpenMP       ", *(f"{Path(file).parent.parent.name}'s" for file in runtimes))
        assert len(runtimes) == 1, f"several OpenMP runtimes in one process: {runtimes}"
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, (folder,), nprocs=2)


if __name__ == "__main__":
    main(sys.argv[1])
