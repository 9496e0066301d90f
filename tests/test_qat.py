"""Fake quantization: its arithmetic against the formulas, and on two ranks under FSDP2."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import qat_cases
import torch
from ranks import check_case, run_cases, run_ranks
from torch import nn

import qsdp
from qsdp import FakeQuantizer
from qsdp.qat.grid import codes_and_steps, groups_of, initial_log2_step, learned_steps

Results = list[dict[str, str | None]]


@pytest.fixture(scope="module")
def two_ranks() -> Results:
    return run_ranks(run_cases, 2, qat_cases.CASES, tuple(qat_cases.CASES))


@pytest.mark.ranks
@pytest.mark.parametrize("name", qat_cases.CASES)
def test_on_two_ranks(two_ranks: Results, name: str) -> None:
    check_case(two_ranks, name)


@pytest.mark.ranks
def test_resume_on_other_ranks(tmp_path: Path) -> None:
    """Two ranks save, one goes on: the same logits, and the next step."""
    qat_cases.run_on_other_ranks(tmp_path)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("per", ["channel", "tensor"])
def test_values_and_gradients_are_those_of_the_formulas(bits: int, per: str) -> None:
    """Levels, clipping, and LSQ's gradients, written out value by value in float64."""
    torch.manual_seed(bits)
    quantizer = FakeQuantizer(bits, per=per)
    weight = torch.randn(5, 7, 3, requires_grad=True)
    log2_step = initial_log2_step(groups_of(weight, quantizer), quantizer).requires_grad_()
    out = learned_steps(weight, log2_step, quantizer)
    gradient = torch.randn_like(out)
    out.backward(gradient)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    scale = 1 / math.sqrt(high * weight.numel())
    of_steps = [0.0] * log2_step.numel()
    for row in range(5):
        group = row if per == "channel" else 0
        s = float(torch.exp2(log2_step.detach())[group])
        of_group = weight.detach()[row] if per == "channel" else weight.detach()
        assert s == pytest.approx(2 * float(of_group.abs().mean()) / math.sqrt(high), rel=1e-5)
        values = (weight.detach()[row], out.detach()[row], gradient[row], weight.grad[row])
        for w, o, g, of_weight in zip(*(v.flatten().tolist() for v in values), strict=True):
            clipped = w / s < low or w / s > high
            code = min(max(round(w / s), low), high)
            assert o == pytest.approx(s * code, rel=1e-6)
            assert of_weight == (0.0 if clipped else g)
            of_steps[group] += g * (code if clipped else code - w / s) * scale * s * math.log(2)
    assert log2_step.grad.tolist() == pytest.approx(of_steps, rel=1e-3, abs=1e-6)
    assert len(out[0].unique()) <= 2**bits


@pytest.mark.parametrize("bits", range(2, 9))
def test_largest_steps_are_the_grid_of_the_wire(bits: int) -> None:
    """Bit for bit what encode and decode give; and up to 7 bits, again the same when repeated."""
    quantizer = FakeQuantizer(bits, per="block", step="largest", block_size=64)
    weight = torch.randn(40, 128) * torch.logspace(-30, 30, 40)[:, None]
    weight[3] = 0.0
    weight[5, 2:] = 0.0
    codes, steps = codes_and_steps(groups_of(weight, quantizer), quantizer, None)
    values = (codes * steps).reshape(weight.shape)
    form = quantizer.grid(64)
    wire = qsdp.decode(qsdp.encode(weight.flatten(), form), weight.numel(), form)
    assert torch.equal(wire.view(weight.shape), values)
    assert codes.min() == quantizer.lowest and codes.max() == quantizer.highest
    again = values
    for _ in range(3):
        codes, steps = codes_and_steps(groups_of(again, quantizer), quantizer, None)
        again = (codes * steps).reshape(weight.shape)
    assert torch.equal(again, values) or bits == 8
    if bits < 8:
        assert quantizer.wire(64) == form


def test_eight_bits_would_not_be_exact() -> None:
    """The reason why on_the_wire refuses them: the grid of what it gave is another one."""
    quantizer = FakeQuantizer(8, per="block", step="largest", block_size=64)
    weight = torch.randn(400, 64, generator=torch.Generator().manual_seed(0))
    codes, steps = codes_and_steps(weight, quantizer, None)
    again, other = codes_and_steps(codes * steps, quantizer, None)
    assert not torch.equal(again * other, codes * steps)


def test_damaged_values_are_seen() -> None:
    layer = nn.Linear(64, 4)
    with torch.no_grad():
        layer.weight[1, 3] = torch.nan
    for quantizer in (FakeQuantizer(4, step="largest"), FakeQuantizer(4)):
        model = nn.Sequential(copy.deepcopy(layer))
        qsdp.fake_quantize(model, quantizer)
        assert model[0].weight[1].isnan().any() and model[0].weight[0].isfinite().all()


def test_an_optimizer_that_is_there_keeps_its_parameters() -> None:
    """QT-DoG's own trainer loses them at the switch."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters())
    weight = model[0].weight
    model(torch.randn(3, 8)).sum().backward()
    optimizer.step()
    state = optimizer.state[weight]
    qsdp.fake_quantize(model, FakeQuantizer(4), keep=("1",))
    original = model[0].parametrizations.weight.original
    assert original is weight and optimizer.state[original] is state
    before = original.detach().clone()
    model(torch.randn(3, 8)).sum().backward()
    optimizer.step()
    assert not torch.equal(original, before)


def test_remove_and_state_dicts() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(16, 3))
    names, masters = list(model.state_dict()), copy.deepcopy(model.state_dict())
    x = torch.randn(2, 1, 4, 4)
    exact = model(x)
    handle = qsdp.fake_quantize(model, FakeQuantizer(3))
    quantized = model(x)
    assert not torch.equal(exact, quantized)
    with handle.disabled():
        assert torch.equal(model(x), exact)
    folded = handle.quantized_state_dict()
    assert set(folded) == set(names)
    assert len(handle.parameters()) == 2
    assert torch.equal(handle.remove()(x), quantized)
    assert set(model.state_dict()) == set(names)
    assert handle.parameters() == [] and handle.names == () and handle.export() == {}
    model.load_state_dict(masters)
    again = qsdp.fake_quantize(model, FakeQuantizer(3))
    assert torch.equal(again.remove(quantized=False)(x), exact)


def test_quantization_after_training() -> None:
    """Before the switch, export and the state dict tell what quantizing now would give."""
    torch.manual_seed(0)
    first, second = nn.Sequential(nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 8))
    second.load_state_dict(first.state_dict())
    later = qsdp.fake_quantize(first, FakeQuantizer(4, start_step=5))
    now = qsdp.fake_quantize(second, FakeQuantizer(4))
    assert torch.equal(later.export()["0.weight"].codes, now.export()["0.weight"].codes)
    for _ in range(5):
        later.step()
    assert torch.equal(first[0].weight, second[0].weight)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bits": 1}, "must be an integer from 2 to 8, got 1"),
        ({"per": "row"}, "must be one of channel, tensor, block, got 'row'"),
        ({"step": "fixed"}, "must be one of learned, largest, got 'fixed'"),
        ({"start_step": -1}, "must be an integer of at least 0, got -1"),
        ({"block_size": 64}, 'needs per="block"'),
        ({"per": "block", "step": "largest"}, "needs block_size, a multiple of 32"),
        ({"per": "block", "block_size": 64}, 'takes step="largest"'),
    ],
)
def test_bad_fields_are_one_line(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as error:
        FakeQuantizer(**fields)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_bad_models_are_one_line() -> None:
    linear = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(ValueError, match="found no layer of Conv2d in Sequential"):
        qsdp.fake_quantize(linear, modules=(nn.Conv2d,))
    with pytest.raises(ValueError, match="'head' matches no layer of Linear"):
        qsdp.fake_quantize(linear, keep=("head",))
    with pytest.raises(ValueError, match="keeps all 2 layers"):
        qsdp.fake_quantize(linear, keep=("*",))
    with pytest.raises(TypeError, match="takes a qsdp.FakeQuantizer, got 4"):
        qsdp.fake_quantize(linear, 4)
    with pytest.raises(ValueError, match="rows of 8 values, which blocks of 32 do not divide"):
        block = FakeQuantizer(4, per="block", step="largest", block_size=32)
        qsdp.fake_quantize(linear, block)
    assert all("parametrizations" not in name for name, _ in linear.named_parameters())
    linear[1].weight = linear[0].weight
    with pytest.raises(ValueError, match="0.weight is also 1.weight"):
        qsdp.fake_quantize(linear)
    with pytest.raises(ValueError, match="on the meta device"):
        qsdp.fake_quantize(nn.Linear(8, 8, device="meta"))
    with pytest.raises(ValueError, match="is torch.bfloat16, and masters are trained in float32"):
        qsdp.fake_quantize(nn.Linear(8, 8, dtype=torch.bfloat16))
    handle = qsdp.fake_quantize(nn.Sequential(nn.Linear(8, 8)))
    with pytest.raises(ValueError, match="takes what state_dict gave"):
        handle.load_state_dict({"step": 3})


def test_flatness_of_a_bowl_is_known() -> None:
    """Of ``a |w|^2`` around 0 it is ``a gamma^2``, whatever the direction; and nothing changes."""
    layer = nn.Linear(10, 10)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()

    def bowl(model: nn.Module) -> torch.Tensor:
        return 3.0 * sum(p.square().sum() for p in model.parameters())

    assert qsdp.flatness(layer, bowl, 0.5, samples=4) == pytest.approx(0.75, rel=1e-4)
    assert not any(p.any() for p in layer.parameters())
    with pytest.raises(ValueError, match="must be a positive number, got 0"):
        qsdp.flatness(layer, bowl, 0)
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        qsdp.flatness(layer, bowl, 1.0, samples=0)


def test_flatness_moves_the_weights_that_are_used() -> None:
    """Off the grid, in the same directions as for a plain model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6))
    x = torch.randn(5, 6)
    handle = qsdp.fake_quantize(model, FakeQuantizer(3))
    folded = nn.Sequential(nn.Linear(6, 6))
    folded.load_state_dict(handle.quantized_state_dict())

    def loss(m: nn.Module) -> torch.Tensor:
        return m(x).square().mean()

    flat = qsdp.flatness(model, loss, 0.1, samples=5)
    assert flat == qsdp.flatness(folded, loss, 0.1, samples=5) != 0
    assert flat != qsdp.flatness(folded, loss, 0.1, samples=5, seed=1)


def test_ensemble_is_the_mean_of_logits() -> None:
    models = [nn.Linear(4, 3) for _ in range(3)]
    x = torch.randn(2, 4)
    mean = torch.stack([model(x) for model in models]).mean(0)
    assert torch.allclose(qsdp.ensemble(models)(x), mean)
    with pytest.raises(ValueError, match="at least one model"):
        qsdp.ensemble([])


@pytest.mark.parametrize(
    "quantizer",
    [
        FakeQuantizer(4),
        FakeQuantizer(4, start_step=2),
        FakeQuantizer(4, per="block", step="largest", block_size=32),
    ],
    ids=["learned", "switch", "block"],
)
def test_compiled_layers_compute_the_same(quantizer: FakeQuantizer) -> None:
    """Output and gradients, on both sides of the switch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 8))
    handle = qsdp.fake_quantize(model, quantizer)
    x = torch.randn(4, 64)
    compiled = torch.compile(model.forward, backend="aot_eager")
    for _ in range(3):
        found = []
        for forward in (model, compiled):
            model.zero_grad()
            out = forward(x)
            out.square().sum().backward()
            found.append([out.detach(), *(p.grad.clone() for p in model.parameters())])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
        handle.step()
