"""Where an operator would run, asked before anything is compiled; and lowerings of the user."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .decompositions import decompositions
from .lowering.functional import Functional
from .lowering.registry import Lowering, lookup, lowers, registered
from .lowering.types import MLIR_DTYPES
from .torch_internals import autograd_decomposes, can_be_functional, is_dispatched

DEVICE, DECOMPOSED, EAGER = "device", "decomposed", "eager"


@dataclasses.dataclass(frozen=True)
class Support:
    """Where one overload runs.

    ``where`` is ``device`` (it has a lowering), ``decomposed`` (PyTorch breaks it into others,
    which are asked in turn) or ``eager``. ``how`` names the roads; ``reason`` says why it is not
    on the device, or what it depends on.
    """

    operator: str
    where: str
    how: str = ""
    reason: str = ""

    def __str__(self) -> str:
        detail = "; ".join(filter(None, (self.how, self.reason)))
        return f"{self.operator}: {self.where}" + (f" ({detail})" if detail else "")


def support(op: Any, dtypes: Sequence[torch.dtype] = ()) -> tuple[Support, ...]:
    """Where an operator would run, an answer for each of its overloads.

    Args:
        op: an overload, an operator (``torch.ops.aten.add``) or a name (``"aten.add"``,
            ``"aten.add.Tensor"``, ``"add"``).
        dtypes: the operands' dtypes; one that has no MLIR type means eager.

    Raises:
        ValueError: if there is no operator of that name.
    """
    return tuple(_answer(overload, dtypes) for overload in _overloads(op))


def all_operators() -> tuple[Support, ...]:
    """An answer for each overload that has a lowering or a decomposition, by name."""
    known = {entry.op for entry in registered()} | set(decompositions())
    known = {op.op if isinstance(op, Functional) else op for op in known}
    overloads = [op for op in known if isinstance(op, torch._ops.OpOverload)]
    return tuple(sorted((_answer(op, ()) for op in overloads), key=lambda item: item.operator))


def register_lowering(
    *ops: Any, refuse: Callable[[fx.Node], str | None] | None = None, random: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Bring operators of your own to the device: decorate a function over ``jax.numpy``.

    It is called as ``function(ctx, *args, **kwargs)`` with the operator's arguments, tensors as
    JAX arrays, while the graph is compiled; it returns one array, or a tuple in the order of the
    operator's results.

    An operator that changes arguments (``mutates_args``, ``Tensor(a!)``) is lowered as a function
    of their old values: after the operator's results come the new values of the changed
    arguments, in the schema's order, each with its argument's shape and dtype; a list of arrays
    for a list of tensors, ``None`` for an optional argument that is ``None``. A result that is
    itself a changed argument (``Tensor(a!)``, with ``torch.Tag.inplace`` or ``torch.Tag.out``) is
    not repeated. So ``x.add_(1)`` that returns nothing is ``lambda ctx, x: x + 1``. Calls in which
    a changed argument shares memory with another one stay in eager PyTorch.

    ``ctx.outputs`` holds the shapes and dtypes that the operator's fake
    implementation promised: the result is converted to that dtype, and another shape sends the
    operator to eager PyTorch with a warning. Without a lowering it runs there as well, between
    partitions. Graphs that were compiled before keep what they have.

    Args:
        ops: overloads (``torch.ops.mylib.op.default``), packets (their default overload), or
            what ``torch.library.custom_op`` returned. A backward that is an operator of its own
            is registered likewise.
        refuse: why a node has no lowering after all, or ``None``.
        random: give the function a seed, ``ctx.seed``, an int64[2] that differs with each call.

    Raises:
        ValueError: for what is no operator, or one that has a lowering already.
    """
    targets = list(map(_overload, ops))
    changing = [target for target in targets if isinstance(target, Functional)]
    others = [target for target in targets if not isinstance(target, Functional)]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        lowers(*others, refuse=refuse, random=random, foreign=True)(function)
        lowers(*changing, refuse=refuse, random=random, foreign=True)(_flattened(function))
        return function

    return decorate


def _flattened(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with its results in one tuple, and none for arguments that are ``None``."""

    @functools.wraps(function)
    def flat(ctx: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        results = pytree.tree_leaves(function(ctx, *args, **kwargs))
        return tuple(result for result in results if result is not None)

    return flat


def _overload(op: Any) -> Any:
    found = getattr(op, "_opoverload", op)  # of torch.library.CustomOpDef
    found = found.default if isinstance(found, torch._ops.OpOverloadPacket) else found
    if not isinstance(found, torch._ops.OpOverload):
        raise ValueError(f"{op!r} is not an operator: give torch.ops.mylib.op.default")
    if not found._schema.is_mutable:
        return found
    if not can_be_functional(found):
        raise ValueError(
            f"{found} changes its arguments in a way that PyTorch cannot make functional; see "
            "torch.library.custom_op, or torch.Tag.inplace and torch.Tag.out for a result that "
            "is an argument"
        )
    return Functional(found)


def _overloads(op: Any) -> Iterator[Any]:
    if isinstance(op, str):
        op = _named(op)
    if isinstance(op, torch._ops.OpOverload):
        yield op
    elif isinstance(op, torch._ops.OpOverloadPacket):
        yield from filter(is_dispatched, (getattr(op, name) for name in op.overloads()))
    else:
        raise ValueError(f"{op!r} is not an operator: give torch.ops.aten.add, or 'aten.add'")


def _named(name: str) -> Any:
    parts = name.removeprefix("torch.ops.").split(".")
    if len(parts) == 1:
        parts.insert(0, "aten")
    found: Any = torch.ops
    for part in parts:
        try:
            found = getattr(found, part)
        except AttributeError:
            raise ValueError(f"there is no operator {name!r}") from None
    return found


def _answer(op: Any, dtypes: Sequence[torch.dtype]) -> Support:
    unknown = [str(dtype) for dtype in dtypes if dtype not in MLIR_DTYPES]
    if unknown:
        return Support(str(op), EAGER, reason=f"no lowering of {', '.join(unknown)}")
    entry = lookup(op) or lookup(Functional(op))
    if entry is not None:
        return Support(str(op), DEVICE, _roads(entry), _condition(entry))
    if op in decompositions() or autograd_decomposes(op):
        return Support(str(op), DECOMPOSED)
    return Support(str(op), EAGER, reason="no lowering and no decomposition")


def _roads(entry: Lowering) -> str:
    roads = [
        name
        for name, road in (("Torch-MLIR", entry.stock), ("spliced", entry.function))
        if road is not None
    ]
    return ", ".join(roads)


def _condition(entry: Lowering) -> str:
    if entry.refuse is not None or entry.function is None:
        return "depends on the arguments"
    return ""
