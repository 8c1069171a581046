"""Grouped products and the layers made of them, against eager.

``torch._grouped_mm`` takes float32 and float16 in eager on the CPU, but its description for
tracing takes bfloat16 alone; no backend sees another.
"""

from __future__ import annotations

import copy

import pytest
import torch

import neuron_compile

from ..support import neuron

F = torch.nn.functional
HALF = torch.bfloat16

GROUPS, ROWS, INNER, COLUMNS = 4, 64, 32, 48
ENDS = {
    "even": [16, 32, 48, 64],
    "empty_groups": [0, 40, 40, 64],
    "all_in_the_last": [0, 0, 0, 64],
    "rows_in_no_group": [5, 8, 30, 41],
    "no_rows": [0, 0, 0, 0],
    "not_a_multiple_of_a_tile": [1, 2, 35, 64],
}
SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "2d_3d": ((ROWS, INNER), (GROUPS, INNER, COLUMNS)),
    "3d_2d": ((GROUPS, COLUMNS, INNER), (INNER, ROWS)),
    "3d_3d": ((GROUPS, ROWS, INNER), (GROUPS, INNER, COLUMNS)),
    "2d_2d": ((INNER, ROWS), (ROWS, COLUMNS)),
}


def operands(form: str, transposed: bool = False) -> list[torch.Tensor]:
    """The right one in column-major order, if ``transposed``."""
    a, b = (torch.randn(shape) for shape in SHAPES[form])
    b = b.transpose(-2, -1).contiguous().transpose(-2, -1) if transposed else b
    return [a.to(HALF), b.to(HALF)]


def offsets(ends: list[int]) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32)


def in_groups(form: str, result: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Without what belongs to no group: eager leaves what was in memory there, we write zeros."""
    last = int(ends[-1])
    return {"2d_3d": result[:last], "3d_2d": result[:, :last]}.get(form, result)


def close(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(actual, wanted, rtol=1.6e-2, atol=1e-2, equal_nan=True)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("form", SHAPES)
def test_forms(form: str, transposed: bool) -> None:
    def function(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return F.grouped_mm(a, b, offs=None if form == "3d_3d" else ends)

    compiled = neuron(function)
    for values in ENDS.values():
        ends, pair = offsets(values), operands(form, transposed)
        actual, wanted = compiled(*pair, ends), function(*pair, ends)
        assert (actual.shape, actual.stride()) == (wanted.shape, wanted.stride())
        close(in_groups(form, actual, ends), in_groups(form, wanted, ends))
    assert neuron_compile.report().operators_in_fallback == 0


def test_rows_in_no_group_are_zero() -> None:
    """Whatever stands there, and in their neighbours' memory."""
    x, weights = operands("2d_3d")
    ends = offsets(ENDS["rows_in_no_group"])
    x[ends[-1] :] = float("nan")
    result = neuron(lambda x, w, ends: F.grouped_mm(x, w, offs=ends))(x, weights, ends)
    assert torch.equal(result[ends[-1] :], torch.zeros_like(result[ends[-1] :]))
    assert result.isfinite().all()
    product = neuron(lambda x, w, ends: F.grouped_mm(x.t(), w, offs=ends))(x, x, ends)
    assert product.isfinite().all()


def test_values_do_not_leak_between_groups() -> None:
    x, weights = operands("2d_3d")
    weights[1] = float("inf")
    ends = offsets(ENDS["not_a_multiple_of_a_tile"])
    wanted = F.grouped_mm(x, weights, offs=ends)
    close(neuron(lambda x, w, ends: F.grouped_mm(x, w, offs=ends))(x, weights, ends), wanted)


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
def test_backward(ends: list[int]) -> None:
    compiled = neuron(lambda x, w, ends: F.grouped_mm(x, w, offs=ends), fullgraph=True)
    tensors, end = operands("2d_3d", transposed=True), offsets(ends)
    mine, theirs = ([x.clone().requires_grad_() for x in tensors] for _ in range(2))
    weight = torch.randn(ROWS, COLUMNS).to(HALF)
    compiled(*mine, end).backward(weight)
    F.grouped_mm(*theirs, offs=end).backward(weight)
    close(mine[0].grad[: end[-1]], theirs[0].grad[: end[-1]])
    close(mine[1].grad, theirs[1].grad)
    assert neuron_compile.report().operators_in_fallback == 0


class Experts(torch.nn.Module):
    """Gated experts: each token goes to ``top`` of them and gets the weighted sum back."""

    def __init__(self, combine: str, experts: int = 6, size: int = 32, hidden: int = 48) -> None:
        super().__init__()
        self.combine, self.experts, self.top = combine, experts, 2
        self.router = torch.nn.Linear(size, experts, bias=False)
        shapes = {"gate": (hidden, size), "up": (hidden, size), "down": (size, hidden)}
        for name, shape in shapes.items():
            values = torch.randn(experts, *shape) * shape[1] ** -0.5
            setattr(self, name, torch.nn.Parameter(values.to(HALF)))

    def product(self, x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return F.grouped_mm(x, weight.transpose(-2, -1), offs=ends)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, chosen = self.router(x).softmax(-1).topk(self.top, dim=-1)
        scores = scores / scores.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.histc(chosen.flatten().float(), self.experts, 0, self.experts - 1)
        ends = counts.cumsum(0).to(torch.int32)
        token = order // self.top
        sent = x.index_select(0, token).to(HALF)
        gated = F.silu(self.product(sent, self.gate, ends)) * self.product(sent, self.up, ends)
        back = self.product(gated, self.down, ends).float()
        back = back * scores.flatten()[order].unsqueeze(-1)
        if self.combine == "inverse":
            back = back[order.argsort()].view(-1, self.top, x.shape[1])
            return back.sum(1)
        if self.combine == "index_add":
            return torch.zeros_like(x).index_add(0, token, back)
        return torch.zeros_like(x).scatter_add(0, token[:, None].expand_as(back), back)


@pytest.mark.parametrize("combine", ["inverse", "index_add", "scatter_add"])
def test_training_a_mixture_of_experts(combine: str) -> None:
    torch.manual_seed(0)
    eager = Experts(combine)
    subject = copy.deepcopy(eager)
    compiled = neuron(subject, fullgraph=True)
    for step in range(3):
        x = torch.randn(40, 32)
        losses = []
        for model, call in ((eager, eager), (subject, compiled)):
            loss = (call(x) - x.roll(1, 1)).square().mean()
            loss.backward()
            losses.append(loss)
            for (name, wanted), actual in zip(
                eager.named_parameters(), subject.parameters(), strict=True
            ):
                if model is subject:
                    torch.testing.assert_close(
                        actual.grad,
                        wanted.grad,
                        rtol=3e-2,
                        atol=3e-2 * float(wanted.grad.abs().max()),
                        msg=lambda text, name=name, step=step: f"{name}, step {step}: {text}",
                    )
        torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-3)
        for model in (eager, subject):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer.step()
            optimizer.zero_grad()
    assert neuron_compile.report().operators_in_fallback == 0
