"""Upsampling and its backward: sizes, scale factors, corners, uint8, infinities, layouts."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from .compare import check, check_on_device

aten = torch.ops.aten

#: Spatial size of the input, and what it becomes: sizes or scale factors.
CASES: list[tuple[int, dict[str, Any]]] = [
    (7, {"size": 12}),
    (7, {"size": 3}),
    (5, {"size": 10}),
    (4, {"size": 4}),
    (4, {"scale_factor": 1.2}),
    (1, {"size": 3}),
    (6, {"size": 1}),
    (13, {"scale_factor": 2.3}),
    (9, {"scale_factor": 0.6, "recompute_scale_factor": True}),
]
MODES = [
    *((mode, rank, None) for mode in ("nearest", "nearest-exact") for rank in (1, 2, 3)),
    *(
        (mode, rank, corners)
        for mode, rank in (("linear", 1), ("bilinear", 2), ("bicubic", 2), ("trilinear", 3))
        for corners in (False, True)
    ),
]


@pytest.mark.parametrize("size, arguments", CASES, ids=str)
@pytest.mark.parametrize("mode, rank, corners", MODES)
def test_values_and_gradients(
    mode: str, rank: int, corners: bool | None, size: int, arguments: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 2, size, *(3,) * (rank - 1), requires_grad=True)
    function = functools.partial(F.interpolate, mode=mode, align_corners=corners, **arguments)
    check(function, x, grad=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_dtypes(mode: str, dtype: torch.dtype) -> None:
    x = torch.randn(1, 3, 5, 6).to(dtype).to(memory_format=torch.channels_last).requires_grad_()
    check(functools.partial(F.interpolate, size=(8, 4), mode=mode), x, grad=True)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_what_is_not_finite_reaches_its_neighbours_only(mode: str) -> None:
    x = torch.zeros(1, 1, 8, 8)
    x[..., 2, 3], x[..., 6, 6] = float("inf"), float("nan")
    check(functools.partial(F.interpolate, scale_factor=2, mode=mode), x)


@pytest.mark.parametrize("channels", [3, 6])
@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_uint8(mode: str, antialias: bool, channels: int) -> None:
    torch.manual_seed(0)
    x = (torch.rand(2, channels, 17, 23) * 256).to(torch.uint8)
    for size in ((32, 11), (17, 40), (5, 5)):
        check(functools.partial(F.interpolate, size=size, mode=mode, antialias=antialias), x)
    check(functools.partial(F.interpolate, size=(9, 9), mode=mode, align_corners=True), x)


@pytest.mark.parametrize("size", [(20, 30), (7, 40), (3, 3), (1, 2)])
@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("kind", ["bilinear", "bicubic", "lanczos"])
def test_antialias(kind: str, corners: bool, size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 11, 17, requires_grad=True)
    function = getattr(aten, f"_upsample_{kind}2d_aa").default
    check(lambda x: function(x, size, corners), x, grad=True)


def test_one_operator_and_one_backward() -> None:
    """What torch decomposes above autograd arrives whole, whatever traced it before."""
    x = torch.randn(1, 2, 4, 4, requires_grad=True)
    function = functools.partial(F.interpolate, scale_factor=2, mode="bilinear")
    before = dict(aten.upsample_bilinear2d.default.py_kernels)
    check_on_device(function, x, use=lambda y: y.sum().backward())
    assert aten.upsample_bilinear2d.default.py_kernels == before
    torch.testing.assert_close(torch.compile(function, backend="aot_eager")(x), function(x))
