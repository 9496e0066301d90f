"""Quantized communication for PyTorch FSDP2 (QSDP: Markov, Vladu, Guo, Alistarh, ICML 2023)."""

from qsdp.collectives import (
    all_gather_quantized,
    all_reduce_quantized,
    reduce_scatter_quantized,
)
from qsdp.config import QSDPConfig
from qsdp.ddp import QuantizedDDPState, quantized_ddp_hook
from qsdp.fsdp import apply_qsdp, comm_stats, is_quantized, observe_comms, remove_qsdp
from qsdp.levels import LevelSchedule
from qsdp.quantizer import Quantizer
from qsdp.rows import decode, encode, wire_bytes
from qsdp.state import comm_state_dict, load_comm_state_dict
from qsdp.stats import CommStats
from qsdp.ways import Differences, Feedback, Learned, Ways

__version__ = "0.1.0"

__all__ = [
    "CommStats",
    "Differences",
    "Feedback",
    "Learned",
    "LevelSchedule",
    "QSDPConfig",
    "QuantizedDDPState",
    "Quantizer",
    "Ways",
    "all_gather_quantized",
    "all_reduce_quantized",
    "apply_qsdp",
    "comm_state_dict",
    "comm_stats",
    "decode",
    "encode",
    "is_quantized",
    "load_comm_state_dict",
    "observe_comms",
    "quantized_ddp_hook",
    "reduce_scatter_quantized",
    "remove_qsdp",
    "wire_bytes",
]
