"""The boundary to torch's private API above the runtime: Dynamo, fake tensors, graphs.

Tested with torch 2.13.0.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch._inductor.inductor_prims  # registers prims.fma
from torch import fx
from torch._decomp import _core_aten_decompositions_post_autograd, get_decompositions
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    SavedForBackwardsAOTOutput,
)
from torch._higher_order_ops.auto_functionalize import (
    AsStridedViewInfo,
    SliceViewInfo,
    can_auto_functionalize,
    get_mutable_args,
    read_view_information_from_args,
)
from torch._library.utils import is_out
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
    unset_fake_temporarily,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.traceback import preserve_node_meta
from torch.utils import _pytree as pytree

from .lowering.functional import Place

#: Wraps an operator with an effect: its first argument and result are tokens.
with_effects = torch.ops.higher_order.with_effects

#: Into this Dynamo turns ``addcmul``.
fma = torch.ops.prims.fma.default


def shared_inputs(
    module: fx.GraphModule, inputs: Sequence[Any]
) -> list[tuple[int, torch.Tensor, torch.Tensor] | None]:
    """Which results of a graph share the memory of an input, by running it on fake tensors.

    The graph may mutate its inputs: that is how eager PyTorch itself would share.

    Returns:
        For each result the position of the input, the (fake) result and the (fake) input; both
        are one object where eager returns the input itself.
    """
    mode = fake_mode()
    with unset_fake_temporarily(), torch.no_grad():
        fakes = fake_inputs(mode, inputs)
        with mode:
            results = pytree.tree_leaves(module(*fakes))
    found: list[tuple[int, torch.Tensor, torch.Tensor] | None] = []
    for result in results:
        same = [i for i, fake in enumerate(fakes) if fake is result]
        same += [i for i, fake in enumerate(fakes) if _one_memory(fake, result)]
        found.append((same[0], result, fakes[same[0]]) if same else None)
    return found


def written_inputs(module: fx.GraphModule, inputs: Sequence[Any]) -> list[int]:
    """Positions of the inputs that a graph writes to, by running it on fake tensors."""
    mode = fake_mode()
    with unset_fake_temporarily(), torch.no_grad():
        # Each with a memory of its own, or a write to one would count for all that share it.
        apart = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in inputs]
        fakes = fake_inputs(mode, apart)
        before = [x._version if isinstance(x, torch.Tensor) else 0 for x in fakes]
        with mode:
            module(*fakes)
        after = [x._version if isinstance(x, torch.Tensor) else 0 for x in fakes]
    return [i for i, (old, new) in enumerate(zip(before, after, strict=True)) if new != old]


def _one_memory(one: Any, other: Any) -> bool:
    """Whether two tensors share memory, and a view can say how."""
    return (
        isinstance(one, torch.Tensor)
        and isinstance(other, torch.Tensor)
        and one.layout is other.layout is torch.strided
        and one.untyped_storage()._cdata == other.untyped_storage()._cdata
        and one.is_conj() == other.is_conj()
        and one.is_neg() == other.is_neg()
    )


def results_alias(module: fx.GraphModule) -> bool:
    """Whether two results that the user sees are not the same tensor, but share its memory.

    Gradients and what a forward saves for the backward are not seen; views of arguments are made
    by AOT Autograd itself.
    """
    output = module.graph.output_node()
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    meanings = output.meta.get("desc") or [None] * len(results)
    hidden = SavedForBackwardsAOTOutput | GradAOTOutput
    seen = {
        result
        for result, meaning in zip(results, meanings, strict=True)
        if isinstance(result, fx.Node) and not isinstance(meaning, hidden)
    }
    arguments = {memory(node) for node in module.graph.find_nodes(op="placeholder")} | {None}
    memories = [found for node in seen if (found := memory(node)) not in arguments]
    return len(set(memories)) < len(memories)


def memory(node: Any) -> int | None:
    """What identifies the storage of a node's tensor."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return int(value.untyped_storage()._cdata)


def decomposed_above_autograd(op: Any) -> list[Any]:
    """The overloads of an operator's packet that torch decomposes in Python above autograd."""
    packet = op.overloadpacket
    overloads = [getattr(packet, name) for name in packet.overloads()]
    return [
        overload
        for overload in overloads
        if torch._C.DispatchKey.Autograd in overload.py_kernels and not overload._schema.is_mutable
    ]


def core_decompositions(more: Sequence[Any]) -> dict[Any, Callable[..., Any]]:
    """Core ATen's decompositions and those of the operators in ``more``.

    The public table also imports ``torch.export`` to add operators that autograd decomposes
    anyway, which costs a fresh process half a second.
    """
    return {**get_decompositions(more), **_core_aten_decompositions_post_autograd()}


def has_symbols(module: fx.GraphModule) -> bool:
    """Whether an input's value or size is symbolic."""
    placeholders = module.graph.find_nodes(op="placeholder")
    return any(symbolic(node.meta.get("val")) for node in placeholders)


def symbolic(values: Any) -> bool:
    """Whether numbers among ``values`` are symbolic, or layouts of tensors."""
    return any(
        isinstance(number, torch.SymInt | torch.SymFloat | torch.SymBool)
        for value in pytree.tree_leaves(values)
        for number in _layout(value)
    )


def free_symbols(values: Any) -> set[Any]:
    """The symbols in the numbers among ``values``, and in layouts of tensors."""
    return {
        symbol
        for value in pytree.tree_leaves(values)
        for number in _layout(value)
        if isinstance(number, torch.SymInt | torch.SymFloat | torch.SymBool)
        for symbol in number.node.expr.free_symbols
    }


def _layout(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, torch.Tensor):
        return (value,)
    strides = value.stride() if value.layout is torch.strided else ()
    return (*value.shape, *strides)


def size_expression(size: Any) -> Any:
    """A size as an int, or as a sympy expression in a graph's symbols."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    expression = size.node.expr
    return int(expression) if expression.is_Integer else expression


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """A copy whose graph may be changed; tensors that the graph holds are shared."""
    return fx.GraphModule(module, copy.deepcopy(module.graph))


def with_own_descriptions(module: fx.GraphModule) -> fx.GraphModule:
    """A copy whose ``meta["val"]`` belong to a fake mode of their own, for another thread.

    A fake mode marks in itself that a kernel is being asked, so two threads must not share one.
    Which descriptions share memory stays as it is.
    """
    module = copied(module)
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    made: dict[int, torch.Tensor] = {}

    def own(value: Any) -> Any:
        if not isinstance(value, FakeTensor):
            return value
        if id(value) not in made:
            with in_kernel_invocation_manager(value.fake_mode):
                plain = value.detach()
            made[id(value)] = FakeTensor(
                mode, plain, value.fake_device, requires_grad=value.requires_grad
            )
        return made[id(value)]

    for node in module.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = pytree.tree_map(own, node.meta["val"])
    return module


def outside_fake_mode() -> AbstractContextManager[Any]:
    """Make real tensors from real tensors, though AOT Autograd compiles under a fake mode."""
    return unset_fake_temporarily()


def retraced(
    graph: fx.GraphModule, inputs: Sequence[Any], decompositions: dict[Any, Callable[..., Any]]
) -> fx.GraphModule:
    """``graph`` traced again for (fake) inputs of static sizes, by the given decompositions.

    Its nodes keep their lines in the user's code.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)

    def run(*args: Any) -> Any:
        with preserve_node_meta():
            return fx.Interpreter(graph).run(*args)

    with unset_fake_temporarily(), torch.no_grad(), mode:
        fakes = [
            torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
            if isinstance(value, torch.Tensor)
            else value
            for value in inputs
        ]
        return make_fx(run, decomposition_table=decompositions)(*fakes)


def fake_mode() -> FakeTensorMode:
    """A fake-tensor mode of its own, whose only symbols are sizes that depend on data."""
    return FakeTensorMode(shape_env=ShapeEnv())


def fake_inputs(mode: FakeTensorMode, args: Sequence[Any]) -> list[Any]:
    """Fake versions of real arguments; numbers stay."""
    return [
        mode.from_tensor(arg, static_shapes=True) if isinstance(arg, torch.Tensor) else arg
        for arg in args
    ]


_STACK_LINE = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


def user_line(node: fx.Node) -> str:
    """``file:line in function`` of the user's code that made a node, or an empty string."""
    found = _STACK_LINE.findall(node.meta.get("stack_trace") or "")
    return "{}:{} in {}".format(*found[-1]) if found else ""


def boxed(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark a function that takes its arguments as one list, which it empties."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function


def is_dispatched(op: Any) -> bool:
    """Whether an overload is a tensor operator (TorchScript has others, ``aten.add.str``)."""
    return bool(torch._C._dispatch_has_kernel(op.name()))


def autograd_decomposes(op: Any) -> bool:
    """Whether an overload is made of others before a backend can see it."""
    return bool(op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


def can_be_functional(op: Any) -> bool:
    """Whether AOT Autograd makes an operator that changes its arguments functional."""
    return bool(can_auto_functionalize(op))


def is_out_operator(op: Any) -> bool:
    """Whether an operator writes its results into arguments that it does not read."""
    return bool(is_out(op))


def mutated_places(
    op: Any, arguments: dict[str, Any], bases: Sequence[torch.Tensor]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What ``auto_functionalized_v2`` knows of the arguments of ``op``: those that are read, and
    where those that are changed lie in the bases (lists for lists, ``None`` for ``None``)."""
    names, types = get_mutable_args(op)
    rest = dict(arguments)
    views = read_view_information_from_args(names, types, rest, list(bases))

    def place(info: Any) -> Place | None:
        if info is None:
            return None
        base = bases[info.base_index]
        size, stride, begin = tuple(base.shape), tuple(base.stride()), int(base.storage_offset())
        if isinstance(info, SliceViewInfo):
            # Its numbers count from the begin of the storage.
            dim = int(info.dim)
            start, end = (int(bound) - begin // stride[dim] for bound in (info.start, info.end))
            size = (*size[:dim], end - start, *size[dim + 1 :])
            offset = start * stride[dim]
            return Place(info.base_index, size, stride, offset, slice=(dim, start, end))
        if isinstance(info, AsStridedViewInfo):
            size, stride = tuple(map(int, info.size)), tuple(map(int, info.stride))
            return Place(info.base_index, size, stride, info.storage_offset - begin)
        return Place(info.base_index, size, stride, 0, whole=True)

    return rest, pytree.tree_map(place, views)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a description, of a fake mode's."""
    return isinstance(tensor, FakeTensor)
