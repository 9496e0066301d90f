"""Quantized communication for PyTorch FSDP2 (QSDP: Markov, Vladu, Guo, Alistarh, ICML 2023).

A public name is imported when it is first asked for: ``import qsdp`` alone does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qsdp.auto import Decision, apply_qsdp, decide
    from qsdp.collectives import (
        all_gather_quantized,
        all_reduce_quantized,
        reduce_scatter_quantized,
    )
    from qsdp.config import QSDPConfig
    from qsdp.ddp import QuantizedDDPState, quantized_ddp_hook
    from qsdp.decoded import decoded_state_dict, decoded_weights
    from qsdp.fsdp import comm_stats, is_quantized, observe_comms, remove_qsdp
    from qsdp.levels import LevelSchedule
    from qsdp.local.config import OuterStep, SyncConfig
    from qsdp.local.meeting import Meeting
    from qsdp.local.schedule import SyncSchedule
    from qsdp.local.sync import ReplicaSync
    from qsdp.qat import FakeQuantizer, ensemble, fake_quantize, flatness
    from qsdp.quantizer import Quantizer
    from qsdp.rows import decode, encode, wire_bytes
    from qsdp.second_moment import freeze_second_moment
    from qsdp.state import comm_state_dict, load_comm_state_dict
    from qsdp.stats import CommStats
    from qsdp.ways import Differences, Feedback, Learned, Warmup, Ways

__version__ = "0.1.0"

__all__ = [
    "CommStats",
    "Decision",
    "Differences",
    "FakeQuantizer",
    "Feedback",
    "Learned",
    "LevelSchedule",
    "Meeting",
    "OuterStep",
    "QSDPConfig",
    "QuantizedDDPState",
    "Quantizer",
    "ReplicaSync",
    "SyncConfig",
    "SyncSchedule",
    "Warmup",
    "Ways",
    "all_gather_quantized",
    "all_reduce_quantized",
    "apply_qsdp",
    "comm_state_dict",
    "comm_stats",
    "decide",
    "decode",
    "decoded_state_dict",
    "decoded_weights",
    "encode",
    "ensemble",
    "fake_quantize",
    "flatness",
    "freeze_second_moment",
    "is_quantized",
    "load_comm_state_dict",
    "observe_comms",
    "quantized_ddp_hook",
    "reduce_scatter_quantized",
    "remove_qsdp",
    "wire_bytes",
]

# Where each name is defined; the imports above say the same to type checkers and editors.
_NAMES = {
    "auto": ("Decision", "apply_qsdp", "decide"),
    "collectives": ("all_gather_quantized", "all_reduce_quantized", "reduce_scatter_quantized"),
    "config": ("QSDPConfig",),
    "ddp": ("QuantizedDDPState", "quantized_ddp_hook"),
    "decoded": ("decoded_state_dict", "decoded_weights"),
    "fsdp": ("comm_stats", "is_quantized", "observe_comms", "remove_qsdp"),
    "levels": ("LevelSchedule",),
    "local.config": ("OuterStep", "SyncConfig"),
    "local.meeting": ("Meeting",),
    "local.schedule": ("SyncSchedule",),
    "local.sync": ("ReplicaSync",),
    "qat": ("FakeQuantizer", "ensemble", "fake_quantize", "flatness"),
    "quantizer": ("Quantizer",),
    "rows": ("decode", "encode", "wire_bytes"),
    "second_moment": ("freeze_second_moment",),
    "state": ("comm_state_dict", "load_comm_state_dict"),
    "stats": ("CommStats",),
    "ways": ("Differences", "Feedback", "Learned", "Warmup", "Ways"),
}


def __getattr__(name: str) -> Any:
    """A public name, or the module of one, imported now (PEP 562)."""
    for module, names in _NAMES.items():
        if name in (module, *names):
            found = importlib.import_module(f"qsdp.{module}")
            value = found if name == module else getattr(found, name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'qsdp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
