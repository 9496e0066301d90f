"""torchtitan: a model's specification whose ``parallelize_fn`` ends with qsdp.

torchtitan shards in ``parallelize_fn`` and switches FSDP2's own division of gradients off, so
qsdp's reduce-scatter sums, with PREMUL_SUM(1.0), and the trainer's loss is scaled by tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass, replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from torch import nn

from qsdp import QSDPConfig, apply_qsdp

P = ParamSpec("P")
Spec = TypeVar("Spec")


def quantized_parallelize(
    parallelize_fn: Callable[P, nn.Module], config: QSDPConfig | str
) -> Callable[P, nn.Module]:
    """``parallelize_fn``, with the communication of the model that it returns quantized."""

    @wraps(parallelize_fn)
    def parallelize(*args: P.args, **kwargs: P.kwargs) -> nn.Module:
        return apply_qsdp(parallelize_fn(*args, **kwargs), config)

    return parallelize


def quantized_spec(spec: Spec, config: QSDPConfig | str) -> Spec:
    """A copy of a torchtitan ``ModelSpec`` (``TrainSpec`` before 0.3) that trains with qsdp.

    Args:
        config: equal on all ranks; the name of a preset will do (``"w8g8"``).

    Raises:
        TypeError: ``spec`` has no ``parallelize_fn``.
    """
    if not is_dataclass(spec) or isinstance(spec, type) or not hasattr(spec, "parallelize_fn"):
        raise TypeError(
            "quantized_spec takes a torchtitan ModelSpec or TrainSpec, which has a parallelize_fn, "
            f"got {type(spec).__name__}"
        )
    changed: Any = {"parallelize_fn": quantized_parallelize(spec.parallelize_fn, config)}
    return replace(spec, **changed)
