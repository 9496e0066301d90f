"""Local steps drift sideways in a valley faster than data parallel: QSR's reason, on an exact case.

The loss is ``h(x) y^2 / 2`` with ``h(x) = 1 + x^2``: a valley along x, flattest at x = 0. K workers
take SGD steps with noise in the gradient of y, and average every H steps. One step moves x by
``-eta x y^2`` on average, towards flatter places, so the drift is as large as the mean of a
worker's ``y^2``. With x held where it is (1 here, so that h is 2), as over times in which it hardly
moves, that mean is known exactly.
"""

from __future__ import annotations

import torch

from research.theory.claims import Claim, Part, estimate

_WORKERS, _CURVATURE, _TRIALS = 4, 2.0, 2000
_BURN_IN = 3.0  # eta times steps, after which the start counts for 1 part in 100,000


def drift_ratio(eta: float, curvature: float, workers: int, interval: int) -> float:
    """Sideways drift of local SGD, over that of parallel SGD with the same batches.

    The mean of all workers moves as in parallel SGD. A worker's distance from it is zero after a
    synchronisation, and its variance approaches (K - 1) times that of the mean.
    """
    rho = (1 - eta * curvature) ** 2
    return 1 + (workers - 1) * (1 - (1 - rho**interval) / (interval * (1 - rho)))


def local_steps(*, trials: int = _TRIALS) -> Part:
    """Measured drift against the formula, for growing intervals."""
    claims = []
    for eta, intervals in ((0.05, (1, 4, 16, 64)), (0.01, (16,))):
        for interval in intervals:
            ratio = estimate(_measured(eta, interval, trials))
            claims.append(
                Claim(
                    f"H = {interval}",
                    f"eta {eta}, K {_WORKERS}, h {_CURVATURE:g}",
                    ratio,
                    "=",
                    drift_ratio(eta, _CURVATURE, _WORKERS, interval),
                    within=0.1,
                )
            )
    text = "mean y^2 of a worker over that of parallel SGD; reference: the formula"
    return Part("QSR: sideways drift of local steps in a valley", text, claims)


def _measured(eta: float, interval: int, trials: int) -> torch.Tensor:
    """(trials,): mean over workers and the steps of some rounds, from independent starts."""
    generator = torch.Generator().manual_seed(interval)
    y = torch.zeros(trials, _WORKERS, dtype=torch.float64)
    rounds = max(4, 64 // interval)
    burn_in = -(-round(_BURN_IN / eta) // interval)
    total = torch.zeros(trials, dtype=torch.float64)
    for number in range(burn_in + rounds):
        for _ in range(interval):
            if number >= burn_in:
                total += y.square().mean(1)
            noise = torch.randn(y.shape, generator=generator, dtype=torch.float64)
            y = y - eta * (_CURVATURE * y + noise)
        y = y.mean(1, keepdim=True).expand(-1, _WORKERS).clone()
    parallel = eta**2 / _WORKERS / (1 - (1 - eta * _CURVATURE) ** 2)
    return total / (rounds * interval) / parallel
