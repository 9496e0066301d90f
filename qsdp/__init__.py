"""Quantized communication for PyTorch FSDP2 (QSDP: Markov, Vladu, Guo, Alistarh, ICML 2023)."""

from qsdp.collectives import (
    all_gather_quantized,
    all_reduce_quantized,
    reduce_scatter_quantized,
)
from qsdp.config import IntraNode, Override, QSDPConfig
from qsdp.ddp import QuantizedDDPState, quantized_ddp_hook
from qsdp.fsdp import apply_qsdp, comm_stats, is_quantized, observe_comms, remove_qsdp
from qsdp.levels import LevelSchedule
from qsdp.quantizer import Quantizer
from qsdp.state import (
    comm_state_dict,
    comm_tensors,
    load_comm_state_dict,
    load_comm_tensors,
)
from qsdp.stats import CommStats

__version__ = "0.1.0"

__all__ = [
    "CommStats",
    "IntraNode",
    "LevelSchedule",
    "Override",
    "QSDPConfig",
    "QuantizedDDPState",
    "Quantizer",
    "all_gather_quantized",
    "all_reduce_quantized",
    "apply_qsdp",
    "comm_state_dict",
    "comm_stats",
    "comm_tensors",
    "is_quantized",
    "load_comm_state_dict",
    "load_comm_tensors",
    "observe_comms",
    "quantized_ddp_hook",
    "reduce_scatter_quantized",
    "remove_qsdp",
]
