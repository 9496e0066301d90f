"""Quantization-aware training: weights that are already in few bits while they are trained (QT-DoG,
arXiv 2410.06020), what that does to generalization, and how such a model leaves training.
"""

from qsdp.qat.ensemble import Ensemble, ensemble
from qsdp.qat.flatness import flatness
from qsdp.qat.model import CodedWeight, FakeQuantization, fake_quantize
from qsdp.qat.quantizer import FakeQuantizer

__all__ = [
    "CodedWeight",
    "Ensemble",
    "FakeQuantization",
    "FakeQuantizer",
    "ensemble",
    "fake_quantize",
    "flatness",
]
