"""What qsdp relies on in FSDP2: the check itself, that it notices changes, and what is newer."""

from __future__ import annotations

import subprocess
import sys

import contract_cases as cases
import pytest
from ranks import check_case, run_cases, run_ranks

# Each breaks one thing as a torch of the future might, and is told by these words.
CHANGES = {
    "a parameter more in a comm's call": (
        "from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather\n"
        "old = AllGather.__call__\n"
        "def call(self, output_tensor, input_tensor, group, layout, async_op=False): ...\n"
        "call.__qualname__ = old.__qualname__\n"
        "AllGather.__call__ = call\n",
        "AllGather.__call__ takes",
    ),
    "a name": (
        "del G.post_backward\n",
        "no FSDPParamGroup.post_backward",
    ),
    "another state in backward": (
        "old = G.unshard\n"
        "def unshard(self, *args):\n"
        "    self._training_state = C.TrainingState.IDLE\n"
        "    return old(self, *args)\n"
        "G.unshard = unshard\n",
        "gathers of forward and backward are told apart",
    ),
    "another order in the gathered buffer": (
        "old = F._get_param_all_gather_inputs\n"
        "F._get_param_all_gather_inputs = lambda params: old(params)[::-1]\n",
        "step raises nothing: RuntimeError",  # torch itself finds sizes that do not fit
    ),
    "another order in the reduced buffer": (
        "old = F.foreach_reduce_scatter_copy_in\n"
        "F.foreach_reduce_scatter_copy_in = lambda grads, *rest: old(grads[::-1], *rest)\n",
        "a reduction gets a row of gradients for each rank, in that order",
    ),
    "an all-reduce in a group that it remembers": (
        "M = C.HSDPMeshInfo\n"
        "own = M.__post_init__\n"
        "def init(self):\n"
        "    own(self)\n"
        "    object.__setattr__(self, 'first', self.replicate_process_group)\n"
        "M.__post_init__ = init\n"
        "G._all_reduce_process_group = property(lambda self: self.mesh_info.first)\n",
        "FSDP2's own all-reduce stays with this rank",
    ),
    "no hook after the reduction": (
        "old = P.foreach_reduce\n"
        "def reduce(*args, **kwargs):\n"
        "    args = [None if callable(a) and a.__class__.__name__.startswith('builtin') else a\n"
        "            for a in args]\n"
        "    return old(*args, **kwargs)\n"
        "P.foreach_reduce = reduce\n",
        "the hook gets what was reduced, once",
    ),
}
IMPORTS = (
    "import torch\n"
    "from torch.distributed.fsdp._fully_shard import _fsdp_collectives as F\n"
    "from torch.distributed.fsdp._fully_shard import _fsdp_common as C\n"
    "from torch.distributed.fsdp._fully_shard import _fsdp_param_group as P\n"
    "G = P.FSDPParamGroup\n"
)
CHECK = "from qsdp.contract import differences\nprint(*differences(), sep='\\n')\n"

Results = list[dict[str, str | None]]


def printed_by(code: str) -> str:
    """What a fresh interpreter prints; the check makes a process group of its own."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_this_torch_does_what_qsdp_relies_on() -> None:
    assert printed_by(CHECK).strip() == ""


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_noticed(name: str) -> None:
    change, words = CHANGES[name]
    assert words in printed_by(IMPORTS + change + CHECK)


def test_what_torch_lacks_is_said_at_the_import() -> None:
    """In one line, with the versions that have it."""
    code = (
        "import torch.distributed.fsdp._fully_shard._fsdp_api as api\n"
        "del api.AllGather\n"
        "try:\n"
        "    import qsdp\n"
        "    qsdp.apply_qsdp(None, 'w8g8')\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    message = printed_by(code).strip()
    assert "custom collectives, which torch 2.9 and newer have" in message and "\n" not in message


@pytest.fixture(scope="module")
def two_ranks() -> Results:
    return run_ranks(run_cases, 2, cases.TWO, tuple(cases.TWO))


@pytest.fixture(scope="module")
def four_ranks() -> Results:
    return run_ranks(run_cases, 4, cases.FOUR, tuple(cases.FOUR))


@pytest.mark.ranks
@pytest.mark.parametrize("name", cases.TWO)
def test_on_two_ranks(two_ranks: Results, name: str) -> None:
    check_case(two_ranks, name)


@pytest.mark.ranks
@pytest.mark.parametrize("name", cases.FOUR)
def test_on_four_ranks(four_ranks: Results, name: str) -> None:
    check_case(four_ranks, name)
