"""Functions to minimise, each with the constants that the theorems ask for.

Rows are independent trials everywhere: points are (num_rows, dim) float64.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

INSTALL_SKLEARN = "pip install scikit-learn"


@dataclass(frozen=True)
class Problem:
    """A smooth function and what is known of it.

    Attributes:
        smoothness: beta, of the gradient's Lipschitz bound.
        pl: alpha, with ``|grad f|^2 >= 2 alpha (f - min f)``.
        noise: sigma^2, a bound on ``E|sample - gradient|^2`` at every point.
        noise_growth: rho, where the bound is ``rho |gradient|^2 + sigma^2``.
        minimiser: (dim,), and ``minimum`` its value.
        loss: (num_rows, dim) to (num_rows,).
        gradient: (num_rows, dim) to the same shape.
        sample: the same with an unbiased stochastic gradient, drawn from a generator.
    """

    name: str
    smoothness: float
    pl: float
    noise: float
    minimiser: torch.Tensor
    minimum: float
    loss: Callable[[torch.Tensor], torch.Tensor]
    gradient: Callable[[torch.Tensor], torch.Tensor]
    sample: Callable[[torch.Tensor, torch.Generator], torch.Tensor]
    noise_growth: float = 0.0

    @property
    def condition(self) -> float:
        """kappa = beta / alpha."""
        return self.smoothness / self.pl

    @property
    def dim(self) -> int:
        return self.minimiser.numel()

    def excess(self, x: torch.Tensor) -> torch.Tensor:
        """``f(x) - min f`` of every row."""
        return self.loss(x) - self.minimum


def curvatures(condition: float, dim: int) -> torch.Tensor:
    """(dim,) evenly spaced from 1 to ``condition``."""
    return torch.linspace(1, condition, dim, dtype=torch.float64)


def quadratic(curvature: torch.Tensor, *, noise: float = 0.0, seed: int = 0) -> Problem:
    """``f(x) = 1/2 sum h_i (x_i - m_i)^2`` with a minimiser that lies on no lattice.

    Gradients carry normal noise with ``E|noise|^2 = noise``.
    """
    dim = curvature.numel()
    minimiser = torch.rand(dim, generator=generator(seed), dtype=torch.float64) * 2 - 1

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (0.5 * curvature * (x - minimiser) ** 2).sum(-1)

    def gradient(x: torch.Tensor) -> torch.Tensor:
        return curvature * (x - minimiser)

    def sample(x: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
        if not noise:
            return gradient(x)
        normal = torch.randn(x.shape, generator=draw, dtype=x.dtype)
        return gradient(x) + normal * math.sqrt(noise / dim)

    beta, alpha = float(curvature.max()), float(curvature.min())
    name = f"kappa {beta / alpha:g}"
    return Problem(name, beta, alpha, noise, minimiser, 0.0, loss, gradient, sample)


def logistic(*, ridge: float = 0.5, part: float = 0.5, columns: int = 30) -> Problem:
    """L2-regularised logistic regression on scikit-learn's breast cancer data (569 x 30).

    Features are standardised; the intercept is a feature and is regularised as well, so that
    alpha = ridge. Stochastic gradients take every example with probability ``part`` (all of them
    at 1). An example's gradient is at most as long as its features, so
    ``sigma^2 = (1 - part) / (part N) * mean |features|^2`` at every point.

    Args:
        columns: how many of the 30 features to use, the first ones.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
    """
    features, sign = _breast_cancer(columns)
    count = len(features)
    signed = features * sign[:, None]
    largest = float(torch.linalg.eigvalsh(features.T @ features / count)[-1])

    def loss(x: torch.Tensor) -> torch.Tensor:
        fit = torch.nn.functional.softplus(-(x @ signed.T)).mean(-1)
        return fit + 0.5 * ridge * (x**2).sum(-1)

    def gradient(x: torch.Tensor) -> torch.Tensor:
        return -torch.sigmoid(-(x @ signed.T)) @ signed / count + ridge * x

    def sample(x: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
        if part == 1:
            return gradient(x)
        chosen = torch.rand(len(x), count, generator=draw, dtype=x.dtype) < part
        weight = torch.sigmoid(-(x @ signed.T)) * chosen
        return -weight @ signed / (part * count) + ridge * x

    minimiser = _newton(gradient, signed, ridge)
    return Problem(
        name="logistic" if columns == 30 else f"logistic {columns}",
        smoothness=largest / 4 + ridge,
        pl=ridge,
        noise=(1 - part) / (part * count) * float((features**2).sum(-1).mean()),
        minimiser=minimiser,
        minimum=float(loss(minimiser[None])[0]),
        loss=loss,
        gradient=gradient,
        sample=sample,
    )


def valley() -> Problem:
    """``f(x) = 1/2 (w.x)^2`` with ``w = (2, -1, -1) / sqrt 6``: PL, but minimal on a plane.

    ``w`` is orthogonal to (1, 1, 1), so every shift of a lattice along it holds exact minima.
    """
    w = torch.tensor([2.0, -1.0, -1.0], dtype=torch.float64) / math.sqrt(6)

    def gradient(x: torch.Tensor) -> torch.Tensor:
        return (x @ w)[:, None] * w

    return Problem(
        name="valley",
        smoothness=1.0,
        pl=1.0,
        noise=0.0,
        minimiser=torch.zeros(3, dtype=torch.float64),
        minimum=0.0,
        loss=lambda x: 0.5 * (x @ w) ** 2,
        gradient=gradient,
        sample=lambda x, _: gradient(x),
    )


def coordinate_bowl() -> Problem:
    """SDP4Bit's counterexample: ``f = |w|^2`` in the plane, gradients of one coordinate at a time.

    ``(4 w_1, 0)`` or ``(0, 4 w_2)``, each with probability 1/2: unbiased, and the noise is exactly
    ``|grad f|^2``, so rho = 1 and sigma = 0.
    """

    def sample(x: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
        first = torch.rand(len(x), 1, generator=draw, dtype=x.dtype) < 0.5
        return 4 * x * torch.cat((first, ~first), dim=1)

    return Problem(
        name="SDP4Bit's counterexample",
        smoothness=2.0,
        pl=2.0,
        noise=0.0,
        minimiser=torch.zeros(2, dtype=torch.float64),
        minimum=0.0,
        loss=lambda x: (x**2).sum(-1),
        gradient=lambda x: 2 * x,
        sample=sample,
        noise_growth=1.0,
    )


def generator(seed: int) -> torch.Generator:
    """A generator of its own for a seed; the global one is never touched."""
    return torch.Generator().manual_seed(seed)


def _breast_cancer(columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Standardised features with a constant one (569, columns + 1), and labels -1 or 1 (569,)."""
    datasets = importlib.import_module("sklearn.datasets")
    table, label = datasets.load_breast_cancer(return_X_y=True)
    table = torch.from_numpy(table)[:, :columns]
    table = (table - table.mean(0)) / table.std(0, correction=0)
    features = torch.cat((table, torch.ones(len(table), 1, dtype=table.dtype)), dim=1)
    return features, torch.from_numpy(label).double() * 2 - 1


def _newton(
    gradient: Callable[[torch.Tensor], torch.Tensor], signed: torch.Tensor, ridge: float
) -> torch.Tensor:
    """The minimiser, to the last bits of float64: Newton's method converges quadratically here."""
    count, dim = signed.shape
    x = torch.zeros(dim, dtype=torch.float64)
    for _ in range(50):
        slope = gradient(x[None])[0]
        if slope.norm() < 1e-14:
            break
        p = torch.sigmoid(-(signed @ x))
        hessian = (signed * (p * (1 - p))[:, None]).T @ signed / count
        x = x - torch.linalg.solve(hessian + ridge * torch.eye(dim, dtype=x.dtype), slope)
    assert gradient(x[None]).norm() < 1e-13
    return x
