"""Edge cases of layers: pooling, convolutions, matrix products, normalizations, attention."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from .compare import PLAIN, check

INF, NAN = math.inf, math.nan
VENDOR = [{"vendor_kernels": True}, PLAIN]
BOTH = pytest.mark.parametrize("options", VENDOR, ids=["vendor", "plain"])


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def image(*shape: int, grad: bool = True) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=grad)


MAX_POOLS: list[dict[str, Any]] = [
    {"kernel_size": 2},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True},
    {"kernel_size": (2, 3), "stride": (3, 1), "ceil_mode": True},
    {"kernel_size": 2, "dilation": 2},
    {"kernel_size": 3, "stride": 1, "padding": 1, "dilation": (2, 1)},
    {"kernel_size": 2, "stride": 3, "ceil_mode": True},
]


@pytest.mark.parametrize("settings", MAX_POOLS, ids=str)
def test_max_pool2d(settings: dict[str, Any]) -> None:
    def pool(x: torch.Tensor) -> Any:
        return F.max_pool2d(x, **settings, return_indices=True)

    check(pool, image(2, 3, 7, 8), grad=True)
    check(pool, torch.randint(0, 3, (1, 2, 7, 8)).float().requires_grad_(), grad=True)
    check(pool, image(3, 7, 8), grad=True)


def test_max_pool2d_of_nan_and_infinity() -> None:
    x = torch.randn(1, 1, 6, 6)
    x[0, 0, 0, 0] = NAN
    x[0, 0, 3, 2:] = -INF
    x[0, 0, 2, 2:] = -INF
    x[0, 0, 5, 5] = INF
    check(lambda x: F.max_pool2d(x, 2, return_indices=True), x)
    check(lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), x)
    check(lambda x: F.max_pool2d(x, 2, return_indices=True), torch.full((1, 1, 4, 4), -INF))
    check(lambda x: F.max_pool2d(x, 2, 2, 1, return_indices=True), torch.full((1, 1, 4, 4), -INF))


def test_max_pool_of_other_ranks_and_dtypes() -> None:
    check(lambda x: F.max_pool1d(x, 3, 2, 1), image(2, 3, 9), grad=True)
    check(lambda x: F.max_pool1d(x, 2, ceil_mode=True), image(3, 9), grad=True)
    check(lambda x: F.max_pool2d(x, 2), torch.randint(-9, 9, (1, 2, 4, 4)))
    check(lambda x: F.max_pool2d(x, 2), torch.randn(1, 2, 4, 4).bfloat16())
    check(lambda x: F.max_pool3d(x, 2, 2, 1, ceil_mode=True), image(1, 2, 5, 6, 5, grad=False))
    check(lambda x: F.max_pool3d(x, 2, 1), image(1, 2, 4, 4, 4), grad=True)


AVG_POOLS: list[dict[str, Any]] = [
    {"kernel_size": 2},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True},
    {"kernel_size": 3, "stride": 2, "padding": 1, "count_include_pad": False},
    {
        "kernel_size": 3,
        "stride": 2,
        "padding": 1,
        "count_include_pad": False,
        "ceil_mode": True,
    },
    {"kernel_size": (2, 3), "stride": (3, 2), "ceil_mode": True},
    {"kernel_size": 2, "divisor_override": 3},
    {"kernel_size": 3, "padding": 1, "divisor_override": 5, "ceil_mode": True},
]


@pytest.mark.parametrize("settings", AVG_POOLS, ids=str)
def test_avg_pool2d(settings: dict[str, Any]) -> None:
    check(lambda x: F.avg_pool2d(x, **settings), image(2, 3, 7, 8), grad=True)
    check(lambda x: F.avg_pool2d(x, **settings), image(3, 7, 8))


def test_other_pools() -> None:
    check(lambda x: F.avg_pool1d(x, 3, 2, 1), image(2, 3, 9), grad=True)
    check(lambda x: F.avg_pool1d(x, 3, 2, 1, True, False), image(2, 3, 8), grad=True)
    check(lambda x: F.avg_pool3d(x, 2, 1, 1), image(1, 2, 4, 5, 4), grad=True)
    for size in (1, (2, 3), (None, 4), (7, 9)):
        check(lambda x, size=size: F.adaptive_avg_pool2d(x, size), image(2, 3, 7, 8), grad=True)
    x = image(2, 3, 7, 10, grad=False)
    x[0, 0, 3, 4], x[1, 1, 0, 0] = INF, NAN  # nothing outside of their windows sees them
    check(lambda x: F.adaptive_avg_pool2d(x, (3, 4)), x)
    check(lambda x: F.adaptive_avg_pool1d(x, 4), image(2, 3, 9), grad=True)
    check(lambda x: F.adaptive_avg_pool3d(x, (2, 3, 1)), image(2, 3, 5, 4, 3), grad=True)
    for size in (1, (2, 3), (7, 9)):
        run = functools.partial(F.adaptive_max_pool2d, output_size=size, return_indices=True)
        check(run, image(2, 3, 7, 8), grad=True)
    check(lambda x: F.adaptive_max_pool2d(x, 2), torch.full((1, 1, 4, 4), NAN))
    check(lambda x: F.adaptive_max_pool1d(x, 4), image(2, 3, 9), grad=True)
    check(lambda x: F.adaptive_max_pool3d(x, 2), image(2, 5, 4, 3), grad=True)
    check(lambda x: F.adaptive_avg_pool2d(x, 2), image(2, 3, 4, 4).detach().bfloat16())


def test_resampling() -> None:
    x = image(1, 2, 4, 5)
    for settings in (
        {"scale_factor": 2, "mode": "nearest"},
        {"size": (7, 3), "mode": "nearest"},
        {"scale_factor": 2, "mode": "bilinear"},
        {"size": (7, 9), "mode": "bilinear", "align_corners": True},
        {"size": (2, 3), "mode": "bicubic"},
    ):
        check(lambda x, settings=settings: F.interpolate(x, **settings), x, grad=True)
    check(lambda x: F.pixel_shuffle(x, 2), image(1, 8, 2, 3), grad=True)
    check(lambda x: F.unfold(x, 2, padding=1, stride=2), image(1, 2, 4, 5), grad=True)


CONVOLUTIONS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "1d": ((2, 3, 9), (4, 3, 3), {}),
    "1d all": ((2, 4, 9), (6, 2, 3), {"stride": 2, "padding": 2, "dilation": 2, "groups": 2}),
    "1d same": ((2, 3, 9), (4, 3, 5), {"padding": "same"}),
    "2d": ((2, 3, 7, 8), (4, 3, 3, 2), {}),
    "2d stride": ((2, 3, 8, 8), (4, 3, 3, 3), {"stride": (2, 3), "padding": (1, 2)}),
    "2d dilation": ((1, 3, 9, 9), (2, 3, 3, 3), {"dilation": (2, 3), "padding": 1}),
    "2d depthwise": ((2, 4, 6, 6), (8, 1, 3, 3), {"groups": 4, "padding": 1, "stride": 2}),
    "2d one by one": ((2, 3, 5, 5), (4, 3, 1, 1), {"stride": 2}),
    "2d leftover": ((1, 2, 8, 8), (3, 2, 3, 3), {"stride": 3}),
    "3d": ((1, 2, 5, 6, 5), (4, 1, 3, 2, 2), {"stride": 2, "padding": 1, "groups": 2}),
}
TRANSPOSED: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "1d": ((2, 3, 6), (3, 4, 3), {}),
    "1d stride": ((2, 3, 6), (3, 4, 3), {"stride": 2, "padding": 1, "output_padding": 1}),
    "2d": ((2, 4, 4, 5), (4, 2, 3, 2), {"stride": (2, 1), "groups": 2}),
    "2d all": (
        (1, 4, 4, 4),
        (4, 3, 3, 3),
        {"stride": 3, "padding": 2, "output_padding": (2, 1), "dilation": 2, "groups": 2},
    ),
    "2d much padding": ((1, 2, 5, 5), (2, 3, 2, 2), {"padding": 2}),
    "3d": ((1, 2, 3, 3, 3), (2, 3, 2, 2, 2), {"stride": 2, "padding": 1, "output_padding": 1}),
}


@BOTH
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution(name: str, options: dict[str, bool]) -> None:
    shape, kernel, settings = CONVOLUTIONS[name]
    function = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[len(shape)]
    x, weight, bias = image(*shape), image(*kernel), image(kernel[0])
    run = lambda x, w, b: function(x, w, b, **settings)  # noqa: E731
    check(run, x, weight, bias, grad=True, options=options)
    check(lambda x, w: function(x, w, **settings), x.detach(), weight, grad=True, options=options)


@BOTH
@pytest.mark.parametrize("name", TRANSPOSED)
def test_transposed_convolution(name: str, options: dict[str, bool]) -> None:
    shape, kernel, settings = TRANSPOSED[name]
    function = {3: F.conv_transpose1d, 4: F.conv_transpose2d, 5: F.conv_transpose3d}[len(shape)]
    bias = image(kernel[1] * settings.get("groups", 1))
    run = lambda x, w, b: function(x, w, b, **settings)  # noqa: E731
    check(run, image(*shape), image(*kernel), bias, grad=True, options=options)


@BOTH
def test_convolution_of_other_layouts_and_dtypes(options: dict[str, bool]) -> None:
    x = image(2, 3, 6, 6).detach().to(memory_format=torch.channels_last)
    weight = image(4, 3, 3, 3).detach()
    check(lambda x, w: F.conv2d(x, w, padding=1), x, weight, options=options)
    check(F.conv2d, x.bfloat16(), weight.bfloat16(), options=options)
    check(F.conv2d, x.double(), weight.double(), options=options)
    check(F.conv2d, x[:0], weight, options=options)
    check(F.conv2d, x[0].contiguous(), weight, options=options)


PRODUCTS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "matrices": ((3, 4), (4, 5)),
    "vectors": ((4,), (4,)),
    "matrix and vector": ((3, 4), (4,)),
    "vector and matrix": ((4,), (4, 5)),
    "batch": ((2, 3, 4), (2, 4, 5)),
    "broadcast batch": ((2, 1, 3, 4), (3, 4, 5)),
    "batch and vector": ((2, 3, 4), (4,)),
    "batch and matrix": ((2, 3, 4), (4, 5)),
    "no inner": ((3, 0), (0, 5)),
    "no rows": ((0, 4), (4, 5)),
    "large": ((70, 80), (80, 90)),
}


@BOTH
@pytest.mark.parametrize("name", PRODUCTS)
def test_matmul(name: str, options: dict[str, bool]) -> None:
    a, b = (image(*shape) for shape in PRODUCTS[name])
    check(torch.matmul, a, b, grad=True, options=options)
    if name not in ("vectors", "no inner", "no rows"):
        check(lambda a, b: a.bfloat16() @ b.bfloat16(), a.detach(), b.detach(), options=options)


@BOTH
def test_products_with_transposes_and_scales(options: dict[str, bool]) -> None:
    a, b, c = image(70, 80), image(70, 80), image(70, 70)
    check(
        lambda a, b, c: (a @ b.t(), a.t() @ b, (a.t() @ b).t(), a @ b.mT + c),
        a,
        b,
        c,
        grad=True,
        options=options,
    )
    check(
        lambda a, b, c: (
            torch.addmm(c, a, b.t()),
            torch.addmm(c, a, b.t(), beta=0.5, alpha=2),
            torch.addmm(c[0], a, b.t()),
            torch.addmm(torch.full_like(c, NAN), a, b.t(), beta=0),
            torch.addmv(c[0], a, b[0]),
            torch.outer(a[0], b[0]),
            torch.einsum("ij,kj->ik", a, b),
            torch.einsum("ij,ij->j", a, b),
        ),
        a.detach(),
        b.detach(),
        c.detach(),
        options=options,
        scale=4,
    )
    x, y, z = image(3, 4, 5), image(3, 5, 6), image(3, 4, 6)
    check(
        lambda x, y, z: (torch.baddbmm(z, x, y, beta=0.3, alpha=2), torch.bmm(x, y).mT),
        x,
        y,
        z,
        grad=True,
        options=options,
    )
    linear = lambda x, w, b: (F.linear(x, w, b), F.linear(x, w))  # noqa: E731
    check(linear, image(2, 3, 5), image(7, 5), image(7), grad=True, options=options)
    i = torch.randint(-9, 9, (3, 4))
    check(lambda i: (i @ i.t(), torch.mv(i, i[0])), i, options=options)


@pytest.mark.parametrize("weight", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_layer_norm(weight: bool, bias: bool) -> None:
    x = image(3, 4, 5)
    for shape in ((5,), (4, 5)):
        w = image(*shape) if weight else None
        b = image(*shape) if bias else None
        check(lambda x, w, b, shape=shape: F.layer_norm(x, shape, w, b), x, w, b, grad=True)
    half = x.detach().bfloat16()
    w = torch.ones(5).bfloat16() if weight else None
    check(lambda x, w: F.layer_norm(x, (5,), w), half, w)


def test_layer_norm_is_accurate_far_from_zero() -> None:
    check(lambda x: F.layer_norm(x, (64,)), torch.randn(8, 64) + 1000, scale=50)
    check(lambda x: F.layer_norm(x, (4,)), torch.zeros(3, 4))
    check(lambda x: F.layer_norm(x, (4,)), torch.zeros(0, 4))


def test_rms_norm() -> None:
    check(lambda x, w: F.rms_norm(x, (5,), w), image(3, 4, 5), image(5), grad=True)
    check(lambda x: F.rms_norm(x, (4, 5), eps=1e-3), image(3, 4, 5), grad=True)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 5), (2, 3, 4, 5), (2, 3, 2, 3, 2)], ids=str)
def test_batch_norm(shape: tuple[int, ...], affine: bool, training: bool) -> None:
    x = image(*shape)
    weight, bias = (image(3), image(3)) if affine else (None, None)
    mean, var = torch.randn(3), torch.rand(3) + 0.5

    def norm(x: Any, m: Any, v: Any, w: Any, b: Any) -> torch.Tensor:
        return F.batch_norm(x, m, v, w, b, training=training, momentum=0.3)

    check(norm, x, mean, var, weight, bias, grad=True)


def test_batch_norm_without_statistics() -> None:
    x, weight = image(4, 3, 5), image(3)
    check(lambda x, w: F.batch_norm(x, None, None, w, training=True), x, weight, grad=True)
    check(F.instance_norm, image(2, 3, 4, 5), grad=True)


@pytest.mark.parametrize("affine", [False, True])
def test_group_norm(affine: bool) -> None:
    for shape, groups in (((2, 6, 4), 3), ((2, 6, 3, 4), 2), ((2, 6), 3), ((1, 6, 2, 2, 2), 6)):
        weight, bias = (image(6), image(6)) if affine else (None, None)
        check(
            lambda x, w, b, groups=groups: F.group_norm(x, groups, w, b),
            image(*shape),
            weight,
            bias,
            grad=True,
            scale=10,  # two elements a group differ by little: their deviation is ill-conditioned
        )


def attention_masks() -> dict[str, Any]:
    mask = torch.rand(5, 7) > 0.4
    mask[:, 0] = True
    empty_row = mask.clone()
    empty_row[2] = False
    return {
        "none": None,
        "bool": mask,
        "float": torch.randn(5, 7),
        "per head": torch.rand(2, 4, 5, 7) > 0.3,
        "broadcast": torch.randn(2, 1, 1, 7),
        "empty row": empty_row,
        "minus infinity": torch.zeros(5, 7).masked_fill(~empty_row, -INF),
    }


@BOTH
@pytest.mark.parametrize("name", attention_masks())
def test_attention_with_masks(name: str, options: dict[str, bool]) -> None:
    mask = attention_masks()[name]
    if name == "per head":
        mask[..., 0] = True
    q, k, v = image(2, 4, 5, 8), image(2, 4, 7, 8), image(2, 4, 7, 8)
    run = F.scaled_dot_product_attention
    check(run, q.detach(), k.detach(), v.detach(), mask, options=options)
    check(run, q, k, v, mask, grad=True, options=options)


@BOTH
def test_attention_forms(options: dict[str, bool]) -> None:
    attention = F.scaled_dot_product_attention
    q, k, v = image(2, 4, 6, 8), image(2, 4, 6, 8), image(2, 4, 6, 8)
    check(lambda q, k, v: attention(q, k, v, is_causal=True), q, k, v, grad=True, options=options)
    check(lambda q, k, v: attention(q, k, v, scale=0.3), q, k, v, grad=True, options=options)
    k2, v2 = image(2, 2, 6, 8), image(2, 2, 6, 8)
    check(
        lambda q, k, v: attention(q, k, v, is_causal=True, enable_gqa=True),
        q,
        k2,
        v2,
        grad=True,
        options=options,
    )
    longer = image(2, 4, 9, 8)
    check(
        lambda q, k, v: attention(q, k, v, is_causal=True),
        q,
        longer,
        image(2, 4, 9, 8),
        grad=True,
        options=options,
    )
    check(attention, longer, k, v, grad=True, options=options)
    half = [x.detach().bfloat16() for x in (q, k, v)]
    check(lambda q, k, v: attention(q, k, v, is_causal=True), *half, options=options)
    check(lambda q: attention(q, q, q), image(3, 6, 8), grad=True, options=options)
    check(
        lambda q, k, v: attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)),
        q,
        k,
        v,
        grad=True,
        options=options,
    )


def test_attention_of_different_value_width() -> None:
    q, k, v = image(1, 2, 3, 8), image(1, 2, 5, 8), image(1, 2, 5, 4)
    check(F.scaled_dot_product_attention, q, k, v, grad=True)


def test_convolution_of_integers() -> None:
    x, weight = torch.randint(-9, 9, (1, 4, 6, 6)), torch.randint(-9, 9, (4, 2, 3, 3))
    check(
        lambda x, w: (
            F.conv2d(x, w, groups=2, padding=1),
            F.conv_transpose2d(x, w, stride=2, groups=2),
            F.conv2d(x.byte(), w.byte(), groups=2),
        ),
        x,
        weight,
    )
