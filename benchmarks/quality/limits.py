"""How near codes of weights come to the least error that their bits allow.

    python benchmarks/quality/limits.py MODEL [--bits 2 3 4] [--out FILE]

MODEL is a folder with model.safetensors, such as RUN/model of `qsdp train`. 131,072 values of its
matrices, and as many from a normal distribution, go through codes that need no memory between
steps: the formats of `qsdp.Quantizer`, and what could be built beyond them. Errors are root mean
squares over all values, relative to those of the values. *True bits* counts all that travels; the
codes of variable length are counted by their entropy, which no real code goes below.

*Above the limit* is how many bits a code spends beyond what the error needs by Shannon's lower
bound for independent values, (1/2) log2(2^(2h) / (2 pi e D)): h is the differential entropy of the
values in units of their blocks of 64, from a histogram, plus the mean logarithm of these units;
D is the mean square error. Knowing the units costs nothing in it, so it is a bound from below.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from errors import SMALL
from safetensors.torch import load_file

from qsdp import Learned, Quantizer, decode, encode
from qsdp.levels import _histogram, best_levels, spread_out

HALF = 16  # bits of a bfloat16
STATE_BITS = 12  # of the trellis
BLOCK = 128
SAMPLED = 128  # blocks of 1,024 values
Coded = tuple[torch.Tensor, float]  # decoded values, true bits a value


def of_format(quantizer: Quantizer | Learned) -> Callable[[torch.Tensor, int], Coded]:
    def code(values: torch.Tensor, bits: int) -> Coded:
        if isinstance(quantizer, Learned):
            chosen = replace(quantizer.quantizer, bits=bits)
            table = spread_out(best_levels(_histogram(values[None], chosen), bits))
            chosen = replace(chosen, levels=table)
        else:
            chosen = replace(quantizer, bits=bits)
        wire = encode(values, chosen)
        return decode(wire, values.numel(), chosen), 8 * wire.numel() / values.numel()

    return code


def lloyd(values: torch.Tensor, count: int, rounds: int = 60) -> torch.Tensor:
    """(count,) levels of least squared error for values: Lloyd's iteration from quantiles."""
    order = values.sort().values
    levels = order[((torch.arange(count) + 0.5) / count * len(order)).long()].clone()
    for _ in range(rounds):
        nearest = torch.bucketize(values, (levels[1:] + levels[:-1]) / 2)
        number = torch.bincount(nearest, minlength=count).clamp_min(1)
        levels = torch.bincount(nearest, values.double(), minlength=count).div(number).float()
        levels = levels.sort().values
    return levels


def to_levels(values: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    return levels[torch.bucketize(values, (levels[1:] + levels[:-1]) / 2)]


def searched(block: int, shared: bool) -> Callable[[torch.Tensor, int], Coded]:
    """One table of levels for all blocks; each block's scale of least squared error among 33.

    With ``shared`` a block's scale is one of 256 multiples of one number for all, else a bfloat16.
    """

    def code(values: torch.Tensor, bits: int) -> Coded:
        rows = values.view(-1, block)
        root = rows.square().mean(1, keepdim=True).sqrt().clamp_min(1e-12)
        levels = lloyd((rows / root).flatten(), 1 << bits)
        top = (root * 2**0.5).max() / 255
        best, error = torch.zeros_like(rows), torch.full_like(root, math.inf)
        for factor in torch.linspace(0.7, 1.4, 33).tolist():
            scale = root * factor
            scale = (scale / top).round().clamp(1, 255) * top if shared else scale.bfloat16()
            decoded = to_levels(rows / scale.float(), levels) * scale.float()
            found = (decoded - rows).square().sum(1, keepdim=True)
            best, error = torch.where(found < error, decoded, best), torch.minimum(found, error)
        return best.flatten(), bits + (8 if shared else HALF) / block

    return code


def entropy_coded(of_blocks: bool) -> Callable[[torch.Tensor, int], Coded]:
    """Multiples of a step, counted by the entropy of all of them.

    ``of_blocks``: steps are in proportion to the root mean square of their block, a bfloat16. Else
    one step serves all, so that large blocks take more bits than small ones, and codes are counted
    by their entropy among blocks of alike size, of which there are 16 kinds.
    """

    def code(values: torch.Tensor, bits: int) -> Coded:
        rows = values.view(-1, BLOCK)
        root = rows.square().mean(1, keepdim=True).sqrt().bfloat16().float().clamp_min(1e-12)
        unit = root if of_blocks else rows.square().mean().sqrt()
        kinds = torch.zeros_like(rows)
        if not of_blocks:
            kinds += (2 * (root / unit).log2()).round().clamp(-10, 5)
        low, high = 1e-3, 16.0
        for _ in range(40):
            step = math.sqrt(low * high)
            codes = (rows / (unit * step)).round()
            if entropy(kinds * 4096 + codes) - entropy(kinds) > bits:
                low = step
            else:
                high = step
        return (codes * step * unit).flatten(), bits + (HALF if of_blocks else 4) / BLOCK

    return code


def entropy(symbols: torch.Tensor) -> float:
    """Bits a symbol."""
    share = torch.unique(symbols, return_counts=True)[1].double() / symbols.numel()
    return float(-(share * share.log2()).sum())


def trellis(values: torch.Tensor, bits: int) -> Coded:
    """A shift register of STATE_BITS as the code's state, a level for each state; Viterbi.

    Every value shifts ``bits`` new bits in, so that levels depend on the values before. Levels are
    quantiles of the values in random order. Blocks begin in a state of their own, which is counted.
    """
    rows = values.view(-1, BLOCK)
    root = rows.square().mean(1, keepdim=True).sqrt().bfloat16().float().clamp_min(1e-12)
    unit = rows / root
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(1 << STATE_BITS, generator=generator)
    quantiles = unit.flatten().sort().values
    # Not learned, so that nothing is fitted to the values; by so much narrower than they are the
    # best codes of a normal distribution lie.
    levels = quantiles[((order + 0.5) / len(order) * len(quantiles)).long()]
    levels = levels * math.sqrt(1 - 4.0**-bits)
    decoded = levels[viterbi(unit, levels, bits)] * root
    return decoded.flatten(), bits + (HALF + STATE_BITS - bits) / BLOCK


def viterbi(rows: torch.Tensor, levels: torch.Tensor, bits: int) -> torch.Tensor:
    """(num_rows, numel) int64: the states whose levels are nearest to the rows of values.

    State t follows the states whose low bits are the high bits of t, whatever their ``bits``
    highest ones are.
    """
    before = 1 << (STATE_BITS - bits)
    cost = torch.zeros(len(rows), len(levels))
    came_from = []
    for column in rows.T:
        least, high = cost.view(len(rows), 1 << bits, before).min(1)
        came_from.append(high.to(torch.uint8))
        cost = least.repeat_interleave(1 << bits, 1) + (column[:, None] - levels).square()
    states = [cost.argmin(1)]
    for high in reversed(came_from[1:]):
        low = states[-1] >> bits
        chosen = high.gather(1, low[:, None])[:, 0].long()
        states.append((chosen << (STATE_BITS - bits)) | low)
    return torch.stack(states[::-1], 1)


CODES: dict[str, Callable[[torch.Tensor, int], Coded]] = {
    "nearest, block 1024": of_format(Quantizer(rounding="nearest")),
    "nearest, block 128": of_format(Quantizer(rounding="nearest", **SMALL)),
    "learned levels, block 128": of_format(Learned(Quantizer(rounding="nearest", **SMALL))),
    "scale search, block 128": searched(128, shared=False),
    "scale search, block 64": searched(64, shared=False),
    "scale search, block 64, 8-bit scales": searched(64, shared=True),
    "scale search, block 32, 8-bit scales": searched(32, shared=True),
    "entropy, a step for each block of 128": entropy_coded(of_blocks=True),
    "entropy, one step for all": entropy_coded(of_blocks=False),
    "trellis of 4,096 states, block 128": trellis,
}


def bits_at_least(values: torch.Tensor, error: float) -> float:
    """Shannon's lower bound on the bits a value, for a mean square error."""
    rows = values.view(-1, 64)
    root = rows.square().mean(1, keepdim=True).sqrt().clamp_min(1e-12)
    unit = (rows / root).flatten().double()
    width = 0.05
    differential = entropy((unit / width).floor()) + math.log2(width)
    differential += float(root.double().log2().mean())
    return differential - 0.5 * math.log2(2 * math.pi * math.e * error)


def tables(sources: dict[str, torch.Tensor], all_bits: list[int]) -> Iterator[str]:
    for source, values in sources.items():
        for bits in all_bits:
            yield f"{source}, {bits} bits".ljust(40) + "true bits     error  above the limit"
            for name, code in CODES.items():
                decoded, true = code(values, bits)
                error = float((decoded - values).double().square().mean())
                relative = math.sqrt(error / float(values.double().square().mean()))
                above = true - bits_at_least(values, error)
                yield f"  {name:38}{true:9.3f}{relative:10.4f}{above:13.3f} bits"
            yield ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--bits", nargs="+", type=int, default=[2, 3, 4])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/quality/results/limits.txt"))
    options = parser.parse_args()
    torch.manual_seed(0)
    matrices = [v for v in load_file(options.model / "model.safetensors").values() if v.ndim > 1]
    blocks = torch.cat([v.float().flatten()[: v.numel() // 1024 * 1024] for v in matrices])
    blocks = blocks.view(-1, 1024)
    weights = blocks[torch.randperm(len(blocks))[:SAMPLED]].flatten()
    sources = {"weights": weights, "normal": torch.randn(weights.numel())}
    lines = []
    for line in tables(sources, options.bits):
        print(line, flush=True)
        lines.append(line)
    options.out.write_text("\n".join(lines).rstrip() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
