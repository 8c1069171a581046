"""Compiles a function with ``backend="neuron"`` and compares all of it with eager."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

import neuron_compile

#: Relative and absolute tolerance for each dtype; others must be equal.
TOLERANCES: Mapping[torch.dtype, tuple[float, float]] = {
    torch.float16: (2e-3, 1e-3),
    torch.bfloat16: (1.6e-2, 1e-2),
    torch.float32: (1e-5, 2e-5),
    torch.float64: (1e-9, 1e-9),
    torch.complex64: (1e-5, 2e-5),
    torch.complex128: (1e-9, 1e-9),
}
PLAIN = {"vendor_kernels": False}


def copied(tree: Any) -> Any:
    """Independent copies of every tensor, with the same strides and ``requires_grad``."""

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)

    return pytree.tree_map(copy, tree)


def assert_same(
    actual: Any, expected: Any, what: str, scale: float = 1.0, strides: bool = True
) -> None:
    """Values (NaN equals NaN), dtypes, shapes and strides of two trees."""
    got, wanted = pytree.tree_leaves(actual), pytree.tree_leaves(expected)
    assert len(got) == len(wanted), f"{what}: {len(got)} results, not {len(wanted)}"
    for index, (a, b) in enumerate(zip(got, wanted, strict=True)):
        label = f"{what}[{index}]"
        if not isinstance(b, torch.Tensor):
            assert a == b, label
            continue
        rtol, atol = TOLERANCES.get(b.dtype, (0.0, 0.0))
        torch.testing.assert_close(
            a,
            b,
            rtol=rtol * scale,
            atol=atol * scale,
            equal_nan=True,
            msg=lambda text, label=label: f"{label}: {text}",  # type: ignore[misc]
        )
        assert not strides or _strides(a) == _strides(b), (
            f"{label}: strides {a.stride()}, not {b.stride()}"
        )


def _strides(tensor: torch.Tensor) -> list[int]:
    """The strides that matter: those of dimensions with more than one element."""
    if tensor.numel() == 0:
        return []
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def gradients(outputs: Any, inputs: Any) -> Sequence[torch.Tensor | None]:
    """Gradients of the inputs that require them, for fixed pseudo-random gradients of outputs."""
    results = [
        leaf
        for leaf in pytree.tree_leaves(outputs)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
    sources = [
        leaf
        for leaf in pytree.tree_leaves(inputs)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
    if not results or not sources:
        return ()
    generator = torch.Generator().manual_seed(0)
    seeds = [torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype) for leaf in results]
    return torch.autograd.grad(results, sources, seeds, allow_unused=True)


def check_on_device(
    function: Callable[..., Any],
    *args: Any,
    options: Mapping[str, Any] | None = None,
    use: Callable[[Any], Any] = lambda result: result,
) -> Any:
    """What ``use`` makes of the result of the compiled function; nothing may run in eager."""
    torch._dynamo.reset()
    compiled = torch.compile(
        function, backend="neuron", fullgraph=True, dynamic=False, options=dict(options or {})
    )
    neuron_compile.reset_report()
    result = use(compiled(*args))
    report = neuron_compile.report()
    assert report.operators_in_fallback == 0, dict(report.fallback_reasons)
    return result


def check(
    function: Callable[..., Any],
    *args: Any,
    grad: bool = False,
    options: Mapping[str, Any] | None = None,
    scale: float = 1.0,
) -> None:
    """Compile ``function`` and compare results, gradients and changed arguments with eager.

    Every operator must run on the device. ``scale`` widens the tolerances.
    """
    expected_args, actual_args = copied(args), copied(args)
    expected = function(*expected_args)
    expected_gradients = gradients(expected, expected_args) if grad else ()
    actual, actual_gradients = check_on_device(
        function,
        *actual_args,
        options=options,
        use=lambda result: (result, gradients(result, actual_args) if grad else ()),
    )
    assert_same(actual, expected, "result", scale)
    # AOT Autograd lays gradients out as their inputs, eager as they happen to come about.
    assert_same(actual_gradients, expected_gradients, "gradient", scale, strides=False)
    assert_same(actual_args, expected_args, "argument", scale)
