"""``grid_sample`` and ``affine_grid``: modes, paddings, corners, positions outside and at edges."""

from __future__ import annotations

import functools
import math

import pytest
import torch
import torch.nn.functional as F

from .compare import check

MODES = [(2, mode) for mode in ("bilinear", "nearest", "bicubic")]
MODES += [(3, "bilinear"), (3, "nearest")]


def operands(rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, *(4, 5, 6)[:rank], generator=generator, dtype=torch.float64)
    grid = torch.rand(2, *(3, 7, 2)[:rank], rank, generator=generator, dtype=torch.float64)
    return x.to(dtype), (grid * 3.4 - 1.7).to(dtype)


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("rank, mode", MODES)
def test_values_and_gradients(rank: int, mode: str, padding: str, corners: bool) -> None:
    x, grid = (value.requires_grad_() for value in operands(rank, torch.float32))
    function = functools.partial(
        F.grid_sample, mode=mode, padding_mode=padding, align_corners=corners
    )
    check(function, x, grid, grad=True, scale=4)


@pytest.mark.parametrize("padding", ["zeros", "border"])
def test_positions_on_the_edge(padding: str) -> None:
    steps = torch.tensor([-1.0, -0.5, 0.0, 0.5, 1.0, -1.5, 9.0, -1e6])
    grid = torch.stack(torch.meshgrid(steps, steps, indexing="ij"), -1)[None].requires_grad_()
    x = torch.randn(1, 2, 5, 5, requires_grad=True)
    function = functools.partial(F.grid_sample, padding_mode=padding, align_corners=True)
    check(function, x, grid, grad=True)


@pytest.mark.parametrize("padding", ["border", "reflection"])
def test_positions_that_are_no_number(padding: str) -> None:
    grid = torch.tensor([0.1, math.nan, math.inf, -math.inf])[None, None, :, None].expand(
        1, 1, 4, 2
    )
    x = torch.randn(1, 2, 5, 5)
    check(functools.partial(F.grid_sample, padding_mode=padding, align_corners=False), x, grid)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rank, mode", MODES)
def test_dtypes(rank: int, mode: str, dtype: torch.dtype) -> None:
    full = dtype is torch.float64  # ATen adds gradients up in a half type, term by term
    x, grid = (value.requires_grad_(full) for value in operands(rank, dtype))
    function = functools.partial(F.grid_sample, mode=mode, align_corners=False)
    check(function, x, grid, grad=full, scale=4)


def test_layouts_and_empty_images() -> None:
    x, grid = operands(2, torch.float32)
    function = functools.partial(F.grid_sample, align_corners=False)
    check(function, x.to(memory_format=torch.channels_last), grid.transpose(1, 2))
    check(function, x[:0], grid[:0])


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("size", [(2, 3, 4, 5), (2, 3, 4, 5, 6)])
def test_affine_grid(size: tuple[int, ...], corners: bool) -> None:
    rank = len(size) - 2
    theta = torch.randn(2, rank, rank + 1, requires_grad=True)
    check(lambda theta: F.affine_grid(theta, list(size), align_corners=corners), theta, grad=True)
