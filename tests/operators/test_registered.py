"""Lowered operators on the samples of PyTorch's own operator tests (``op_db``).

``NAMES`` are the entries of ``op_db`` that run without eager fallback, those that are needed to
reach every lowered operator they reach at all; ``MORE`` are the others, which pass through the
same lowerings after decomposition. Entries whose values are random or unspecified are left out.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from .compare import check

pytest.importorskip("expecttest", reason="torch.testing._internal needs it")

#: Samples an entry and dtype, and elements in all tensors of a sample.
SAMPLES, LARGEST = 2, 20_000


@functools.cache
def entries() -> dict[str, Any]:
    """The entries of ``op_db`` by name and variant."""
    from torch.testing._internal.common_methods_invocations import op_db

    return {
        op.name + (f".{op.variant_test_name}" if op.variant_test_name else ""): op for op in op_db
    }


def size(tree: Any) -> int:
    """Elements of all tensors."""
    leaves = pytree.tree_leaves(tree)
    return sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))


def samples(op: Any, dtype: torch.dtype, count: int, grad: bool) -> list[tuple[Any, ...]]:
    """``count`` samples from the first to the last of the moderate ones."""
    torch.manual_seed(0)
    made = itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=grad), 60)
    found = [(sample.input, sample.args, sample.kwargs) for sample in made]
    found = [sample for sample in found if size(sample) < LARGEST]
    if len(found) <= count:
        return found
    last = len(found) - 1
    return [found[last * i // max(count - 1, 1)] for i in range(count)] if count > 1 else found[-1:]


def run(name: str) -> None:
    """Compare an entry's samples with eager: float32, its gradients, and int64."""
    op = entries()[name]
    supported = op.supported_dtypes("cpu")
    grad = bool(op.supports_autograd)

    def call(x: Any, args: Any, kwargs: Any) -> Any:
        return op.op(x, *args, **kwargs)

    compared = 0
    for dtype, count, differentiate in (
        (torch.float32, 1 if grad else SAMPLES, False),
        (torch.float32, 1, grad),
        (torch.int64, 1, False),
    ):
        if dtype not in supported or (dtype, differentiate, count) == (torch.float32, False, 0):
            continue
        for sample in samples(op, dtype, count, differentiate):
            check(call, *sample, grad=differentiate, scale=4)
            compared += 1
    assert compared


NAMES = """
""".split()

MORE = """
""".split()


@pytest.mark.parametrize("name", NAMES)
def test_values(name: str) -> None:
    run(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_values_of_more(name: str) -> None:
    run(name)
