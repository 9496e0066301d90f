"""Quantized communication for PyTorch FSDP2 (QSDP: Markov, Vladu, Guo, Alistarh, ICML 2023)."""

from qsdp.config import QSDPConfig
from qsdp.quantizer import Quantizer

__all__ = [
    "QSDPConfig",
    "Quantizer",
]
