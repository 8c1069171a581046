"""Compares the backend with eager PyTorch: values, layout, aliasing, mutation and gradients."""

from __future__ import annotations

import copy
import dataclasses
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping
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

#: Relative and absolute tolerance of values; dtypes that are not here must be equal.
VALUES = {
    torch.float16: (2e-3, 1e-3),
    torch.bfloat16: (1.6e-2, 1e-2),
    torch.float32: (4e-5, 4e-5),
    torch.float64: (1e-7, 1e-7),
    torch.complex64: (4e-5, 4e-5),
    torch.complex128: (1e-7, 1e-7),
}
GRADIENTS = {
    **VALUES,
    torch.float32: (1e-4, 1e-4),
    torch.float64: (1e-6, 1e-6),
    torch.complex64: (1e-4, 1e-4),
    torch.complex128: (1e-6, 1e-6),
}


def cases(names: Iterable[str], slow: Collection[str] = ()) -> list[Any]:
    """Parameters of a test, with the marker of slow ones."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in slow)) for name in names]


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
        assert sharing((actual, actual_args)) == sharing((wanted, wanted_args))
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


def sharing(tree: Any) -> list[int]:
    """For each tensor that has memory, the first position of the same storage."""
    leaves = pytree.tree_leaves(tree)
    tensors = [x for x in leaves if isinstance(x, torch.Tensor) and x.layout is torch.strided]
    addresses = [x.untyped_storage().data_ptr() for x in tensors if x.numel()]
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


class Mismatch(AssertionError):
    """A compiled result differs from eager's."""


class Inaccurate(Mismatch):
    """The values of a compiled result differ by more than the tolerance."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Compares trees of tensors: metadata, and values unless they are ``random``."""

    what: str
    tolerances: Mapping[torch.dtype, tuple[float, float]]
    random: bool
    strides: bool = True

    def trees(self, actual: Any, expected: Any, exact: Any = None) -> None:
        """Compare leaf by leaf."""
        mine, structure = pytree.tree_flatten(actual)
        theirs, promised = pytree.tree_flatten(expected)
        wide = pytree.tree_leaves(exact)
        if len(mine) != len(theirs):
            raise Mismatch(f"{self.what}: structure {structure}, not {promised}")
        if len(wide) != len(theirs):
            wide = [None] * len(theirs)
        for index, leaves in enumerate(zip(mine, theirs, wide, strict=True)):
            self._leaves(*leaves, f"{self.what} {index}")

    def _leaves(self, mine: Any, theirs: Any, exact: Any, label: str) -> None:
        if not isinstance(theirs, torch.Tensor):
            if not self.random and repr(mine) != repr(theirs) and mine != theirs:
                raise Mismatch(f"{label}: {mine!r}, not {theirs!r}")
            return
        self._metadata(mine, theirs, label)
        if self.random:
            return
        if theirs.layout is not torch.strided:
            mine, theirs = mine.to_dense(), theirs.to_dense()
        mine, theirs = mine.detach(), theirs.detach()
        rtol, atol = self.tolerances.get(theirs.dtype, (0.0, 0.0))
        try:
            torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol, equal_nan=True)
        except AssertionError as error:
            if not _no_worse(mine, theirs, exact):
                raise Inaccurate(f"{label}: {error}") from error

    def _metadata(self, mine: Any, theirs: torch.Tensor, label: str) -> None:
        if not isinstance(mine, torch.Tensor) or mine.dtype != theirs.dtype:
            raise Mismatch(f"{label}: {getattr(mine, 'dtype', mine)}, not {theirs.dtype}")
        if mine.shape != theirs.shape:
            raise Mismatch(f"{label}: shape {tuple(mine.shape)}, not {tuple(theirs.shape)}")
        if mine.requires_grad != theirs.requires_grad:
            raise Mismatch(f"{label}: requires_grad {mine.requires_grad}")
        strided = self.strides and theirs.layout is torch.strided
        if strided and layout(mine) != layout(theirs):
            raise Mismatch(f"{label}: strides {mine.stride()}, not {theirs.stride()}")


def _no_worse(mine: torch.Tensor, theirs: torch.Tensor, exact: Any) -> bool:
    """Whether a result is no further from the float64 one than eager's (half as far again)."""
    if not isinstance(exact, torch.Tensor) or not (
        theirs.is_floating_point() or theirs.is_complex()
    ):
        return False
    exact = exact.detach()
    mine_error, their_error = (_error(item.to(exact.dtype), exact) for item in (mine, theirs))
    return mine_error <= 1.5 * their_error


def _error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest difference; infinite where only one of the two is a number."""
    same = (found == exact) | (found.isnan() & exact.isnan())
    return float(torch.where(same, 0, (found - exact).abs().nan_to_num(torch.inf)).max())


# What torch says by itself: of one Python release, and in a CUDA build without triton.
TORCH_ON_313 = "ignore:Guards may run slower on Python 3.13.0:RuntimeWarning"
TORCH_WITHOUT_TRITON = "triton not found"


def in_fresh_interpreter(
    script: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a script in an interpreter of its own, outside the repository, and expect success."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("TORCH", "NEURON"))}
    variables["NEURON_COMPILE_CACHE"] = "0"
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
