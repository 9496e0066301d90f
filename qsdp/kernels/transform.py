"""The transform that spreads outliers: the Walsh-Hadamard rotation of 32 values with signs.

[Note: transform] It replaces every 32 consecutive values of a segment, but for a remainder at its
end, by ``y = H (signs * x / 32)``: five stages of sums and differences, one float32 rounding each.
What is said of a block's values in quantizing then holds for y. Decode is ``x = signs * (H y)``, as
``H H = 32``; decode_sum applies it once, to the sum. The signs are one draw of 32, the same
everywhere. The rotation spreads an outlier over its 32 values and leaves the relative
squared error of a vector as it is. Magnitudes above 2^122 may decode to NaN or infinity.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from qsdp.kernels.philox import KEY_ROUNDS, philox4x32

SIZE = 32
_WORD = philox4x32((0, 0, 0, 0), (0, 0), KEY_ROUNDS)[0]
assert isinstance(_WORD, int)
SIGN_BITS = _WORD  # bit j set: value j changes its sign


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """[Note: transform] of (num_rows, numel) float32."""
    return _by_groups(x, lambda groups: _butterflies(groups * _signs(x.device) * (1 / 32)))


def inverse_hadamard(y: torch.Tensor) -> torch.Tensor:
    """The inverse, of (..., numel) float32."""
    return _by_groups(y, lambda groups: _butterflies(groups) * _signs(y.device))


def _by_groups(x: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    cut = x.shape[-1] // SIZE * SIZE
    groups = function(x[..., :cut].unflatten(-1, (-1, SIZE)))
    return torch.cat((groups.flatten(-2), x[..., cut:]), dim=-1)


def _butterflies(x: torch.Tensor) -> torch.Tensor:
    """(..., 32): at distances 1, 2, 4, 8, 16 each pair becomes its sum and its difference."""
    for distance in (1, 2, 4, 8, 16):
        a, b = x.unflatten(-1, (-1, 2, distance)).unbind(-2)
        x = torch.stack((a + b, a - b), dim=-2).flatten(-3)
    return x


def _signs(device: torch.device) -> torch.Tensor:
    bits = torch.arange(SIZE, device=device)
    return 1.0 - 2.0 * ((SIGN_BITS >> bits) & 1).float()
