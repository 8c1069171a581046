"""Compares the backend with eager PyTorch: values, layout, aliasing, mutation and gradients."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

#: Warnings of Dynamo's own doing, which it turns into errors where warnings are errors.
IGNORE_TORCH = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf",
    "ignore:.*torch.jit.script_method. is deprecated",
    "ignore:.*should not be instantiated. Methods on autograd functions",
)


def neuron(function: Any, **options: Any) -> Any:
    """``function`` compiled by the backend under test."""
    return torch.compile(function, backend="neuron", **options)


def check(
    function: Callable[..., Any],
    *args: Any,
    calls: int = 3,
    backward: bool = False,
    rtol: float = 1e-5,
    atol: float = 1e-5,
    mode: Callable[[], Any] = torch.enable_grad,
    **options: Any,
) -> None:
    """Call ``function`` eagerly and compiled, on equal arguments that change from call to call.

    Compared after each call: the structure of the results; their values, dtypes, strides and
    ``requires_grad``; which results and arguments share storage; the arguments afterwards; the
    parameters and buffers of a module. With ``backward``, the gradients of all leaves too.
    """
    eager, subject = function, function
    if isinstance(function, torch.nn.Module):
        eager, subject = copy.deepcopy(function), copy.deepcopy(function)
    compiled = neuron(subject, **options)
    for call in range(calls):
        wanted_args, actual_args = copy.deepcopy(args), copy.deepcopy(args)
        for tensors in (wanted_args, actual_args):
            _vary(tensors, call)
        with mode():
            wanted, actual = eager(*wanted_args), compiled(*actual_args)
        equal(actual, wanted, rtol, atol)
        assert _sharing((actual, actual_args)) == _sharing((wanted, wanted_args))
        if backward:
            _backward(wanted)
            _backward(actual)
        equal(actual_args, wanted_args, rtol, atol)
        _equal_gradients(actual_args, wanted_args, rtol, atol)
        if isinstance(function, torch.nn.Module):
            equal_modules(subject, eager, rtol, atol)


def equal(actual: Any, wanted: Any, rtol: float = 1e-5, atol: float = 1e-5) -> None:
    """Assert equal structure, values, dtypes, strides and ``requires_grad``."""
    actual_leaves, actual_spec = pytree.tree_flatten(actual)
    wanted_leaves, wanted_spec = pytree.tree_flatten(wanted)
    assert actual_spec == wanted_spec
    for mine, theirs in zip(actual_leaves, wanted_leaves, strict=True):
        if not isinstance(theirs, torch.Tensor):
            assert type(mine) is type(theirs)
            assert mine == theirs
            continue
        torch.testing.assert_close(
            mine.detach(), theirs.detach(), rtol=rtol, atol=atol, equal_nan=True
        )
        assert layout(mine) == layout(theirs)
        assert mine.requires_grad == theirs.requires_grad


def layout(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides that matter: those of dimensions with more than one element."""
    if tensor.numel() == 0:
        return ()
    return tuple(
        stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1
    )


def equal_modules(
    actual: torch.nn.Module, wanted: torch.nn.Module, rtol: float = 1e-5, atol: float = 1e-5
) -> None:
    """Assert equal state and equal gradients (or none) of two modules."""
    equal(dict(actual.state_dict()), dict(wanted.state_dict()), rtol, atol)
    _equal_gradients(list(actual.parameters()), list(wanted.parameters()), rtol, atol)


def _equal_gradients(actual: Any, wanted: Any, rtol: float, atol: float) -> None:
    for mine, theirs in zip(_leaves(actual), _leaves(wanted), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=rtol, atol=atol)


def _leaves(tree: Any) -> list[torch.Tensor]:
    tensors = (x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor))
    return [x for x in tensors if x.is_leaf and x.requires_grad]


def _vary(tree: Any, call: int) -> None:
    """Scale all floating storage under the tensors of ``tree``, whatever their layout."""
    done = set()
    for tensor in pytree.tree_leaves(tree):
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            continue
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in done and storage.nbytes() % tensor.element_size() == 0:
            done.add(storage.data_ptr())
            torch.empty(0, dtype=tensor.dtype).set_(storage).mul_(1 + 0.25 * call)


def _sharing(tree: Any) -> list[int]:
    """For each tensor that has memory, the first position in ``tree`` of the same storage."""
    tensors = [x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]
    storages = [x.untyped_storage() for x in tensors if x.numel()]
    addresses = [x.data_ptr() for x in storages]
    return [addresses.index(address) for address in addresses]


def _backward(results: Any) -> None:
    tensors = [x for x in pytree.tree_leaves(results) if isinstance(x, torch.Tensor)]
    tensors = [x for x in tensors if x.requires_grad]
    # Uneven weights, so that a permuted gradient is not the same.
    torch.autograd.backward(tensors, [_ramp(x) for x in tensors])


def _ramp(tensor: torch.Tensor) -> torch.Tensor:
    return (
        torch.linspace(0.5, 1.5, tensor.numel(), dtype=torch.float64)
        .to(tensor.dtype)
        .reshape(tensor.shape)
    )


# What torch says by itself: of one Python release, and in a CUDA build without triton.
TORCH_ON_313 = "ignore:Guards may run slower on Python 3.13.0:RuntimeWarning"
TORCH_WITHOUT_TRITON = "triton not found"


def in_fresh_interpreter(
    script: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a script in an interpreter of its own, outside the repository, and expect success."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("TORCH", "NEURON"))}
    result = subprocess.run(
        [sys.executable, "-W", "error", "-W", TORCH_ON_313, "-c", textwrap.dedent(script)],
        env={**variables, **(environment or {})},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stderr.splitlines(keepends=True)
    result.stderr = "".join(line for line in lines if TORCH_WITHOUT_TRITON not in line)
    return result
