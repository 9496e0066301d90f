"""Quantized communication for PyTorch FSDP2 (QSDP: Markov, Vladu, Guo, Alistarh, ICML 2023)."""

from qsdp.config import QSDPConfig
from qsdp.levels import LevelSchedule
from qsdp.quantizer import Quantizer
from qsdp.rows import decode, encode, wire_bytes
from qsdp.ways import Differences, Feedback, Learned, Ways

__version__ = "0.1.0"
