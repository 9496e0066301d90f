"""Images of several domains: the same classes, drawn or turned differently."""

from __future__ import annotations

import gzip
import importlib.util
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

GLYPH_SIZE = 16
ANGLES = (0, 15, 30, 45, 60, 75)
FASHION_FOLDER = Path("/usr/share/datasets/fashion-mnist")  # of the Debian package
_IMAGES, _LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"
_CANVAS = 48
# Of matplotlib's own fonts, and of packages of one font each. A domain takes files by pattern.
_FONTS: dict[str, tuple[tuple[str, str], ...]] = {
    "sans": (("font_roboto", "Roboto-*.ttf"), ("matplotlib", "DejaVuSans.ttf"),
             ("matplotlib", "DejaVuSans-Bold.ttf")),
    "serif": (("font_source_serif_pro", "SourceSerifPro-*.ttf"), ("matplotlib", "DejaVuSerif.ttf"),
              ("matplotlib", "cmr10.ttf")),
    "mono": (("matplotlib", "DejaVuSansMono*.ttf"), ("matplotlib", "cmtt10.ttf")),
    "drawn": (("font_amatic_sc", "AmaticSC-*.ttf"), ("font_intuitive", "*.ttf"),
              ("font_fredoka_one", "*.ttf")),
}  # fmt: skip
FONT_PACKAGES = tuple(sorted({p for fonts in _FONTS.values() for p, _ in fonts} - {"matplotlib"}))


class Domain(NamedTuple):
    """Images (count, 1, height, width) float32 from 0 to 1, and labels (count,) int64."""

    name: str
    images: torch.Tensor
    labels: torch.Tensor


def glyphs(count: int, seed: int) -> list[Domain]:
    """The ten digits in five domains: four of typefaces, and handwritten ones of scikit-learn.

    Of 16 x 16 pixels; typefaces are drawn in random sizes, places and angles of up to 15 degrees.

    Args:
        count: images of each domain; of handwritten ones at most the 1,797 that there are.

    Raises:
        RuntimeError: a package of fonts is missing.
    """
    random = np.random.default_rng([seed, 1])
    drawn = [_drawn(name, _font_files(name), count, random) for name in _FONTS]
    return [*drawn, _handwritten(count, random)]


def fashion(count: int, seed: int, folder: Path = FASHION_FOLDER) -> list[Domain]:
    """Fashion-MNIST in six angles, other images in each: 28 x 28 pixels, ten classes.

    Args:
        count: images of each angle, at most 10,000.
        folder: of the data set's files for training, as they are published.

    Raises:
        OSError, ValueError: the files are missing or damaged.
    """
    pixels, kinds = _read_idx(folder / _IMAGES), _read_idx(folder / _LABELS)
    order = np.random.default_rng([seed, 2]).permutation(len(kinds))
    domains = []
    for place, angle in enumerate(ANGLES):
        chosen = order[place * count : (place + 1) * count]
        images = torch.from_numpy(pixels[chosen]).float()[:, None] / 255
        labels = torch.from_numpy(kinds[chosen]).long()
        domains.append(Domain(f"{angle} degrees", _turned(images, angle), labels))
    return domains


SETS: dict[str, Callable[..., list[Domain]]] = {"glyphs": glyphs, "fashion": fashion}


def _font_files(domain: str) -> list[Path]:
    files = []
    for package, pattern in _FONTS[domain]:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise RuntimeError(
                f"the domain {domain} needs {package.replace('_', '-')}, not installed here: "
                "pip install 'qsdp[domains]'"
            )
        folder = Path(next(iter(spec.submodule_search_locations)))
        found = sorted(path for path in folder.rglob(pattern) if path.is_file())
        if not found:
            raise RuntimeError(f"{package} here has no font {pattern}: install it again")
        files += found
    return files


def _drawn(name: str, files: Sequence[Path], count: int, random: np.random.Generator) -> Domain:
    """Digits in these fonts."""
    from PIL import Image, ImageDraw, ImageFont

    labels = random.integers(0, 10, count)
    images = np.empty((count, 1, GLYPH_SIZE, GLYPH_SIZE), np.float32)
    for place, label in enumerate(labels):
        file = files[int(random.integers(len(files)))]
        font = ImageFont.truetype(str(file), int(random.integers(32, 45)))
        canvas = Image.new("L", (_CANVAS, _CANVAS))
        middle = _CANVAS / 2 + random.uniform(-4, 4, 2)
        ImageDraw.Draw(canvas).text(tuple(middle), str(label), fill=255, font=font, anchor="mm")
        turned = canvas.rotate(float(random.uniform(-15, 15)), Image.Resampling.BILINEAR)
        small = turned.resize((GLYPH_SIZE, GLYPH_SIZE), Image.Resampling.BOX)
        images[place, 0] = np.asarray(small, np.float32) / 255
    return Domain(name, torch.from_numpy(images), torch.from_numpy(labels))


def _handwritten(count: int, random: np.random.Generator) -> Domain:
    from sklearn.datasets import load_digits

    digits = load_digits()
    chosen = random.permutation(len(digits.target))[:count]
    small = torch.from_numpy(digits.images[chosen]).float()[:, None] / 16
    size = (GLYPH_SIZE, GLYPH_SIZE)
    images = torch.nn.functional.interpolate(small, size, mode="bilinear", align_corners=False)
    return Domain("handwritten", images, torch.from_numpy(digits.target[chosen]).long())


def _turned(images: torch.Tensor, degrees: float) -> torch.Tensor:
    angle = torch.deg2rad(torch.tensor(float(degrees)))
    turn = torch.stack([angle.cos(), -angle.sin(), angle.new_zeros(()),
                        angle.sin(), angle.cos(), angle.new_zeros(())]).view(1, 2, 3)  # fmt: skip
    at = torch.nn.functional.affine_grid(
        turn.expand(len(images), -1, -1), list(images.shape), align_corners=False
    )
    return torch.nn.functional.grid_sample(images, at, align_corners=False)


def _read_idx(path: Path) -> np.ndarray:
    """An array of bytes in the format of MNIST."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: install the Debian package dataset-fashion-mnist, or give "
            f"--folder with {_IMAGES} and {_LABELS} of Fashion-MNIST"
        )
    try:
        content = gzip.decompress(path.read_bytes())
        dimensions = struct.unpack_from(">i", content)[0] & 0xFF
        shape = struct.unpack_from(f">{dimensions}i", content, 4)
        return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape).copy()
    except (ValueError, EOFError, OSError, struct.error) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
