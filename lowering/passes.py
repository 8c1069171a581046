"""FX passes that run just before a graph is imported: they keep values and simplify forms."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import fx

from .functional import Functional
from .region import CALLED, Region
from .registry import ORIGIN, is_check, lookup, result_tensors
from .seeded import SEED_ARGUMENT, Seeded

aten = torch.ops.aten

# A matrix product that reads its operands transposed or not, as every vendor's GEMM can. It
# exists only between these passes and the lowering, and is never executed by torch.
torch.library.define(
    "neuron_compile::gemm", "(Tensor a, Tensor b, bool transpose_a, bool transpose_b) -> Tensor"
)
gemm = torch.ops.neuron_compile.gemm.default

# The same with a bias, rounded once to a half type after the sum, as in ATen.
torch.library.define(
    "neuron_compile::gemm_bias",
    "(Tensor a, Tensor b, Tensor bias, bool transpose_a, bool transpose_b) -> Tensor",
)
gemm_bias = torch.ops.neuron_compile.gemm_bias.default

# The loss of logits, without their logarithmic softmax: like ``gemm``, for the lowering alone.
torch.library.define(
    "neuron_compile::cross_entropy",
    "(Tensor x, Tensor target, Tensor? weight, int reduction, SymInt ignore_index)"
    " -> (Tensor, Tensor)",
)
cross_entropy = torch.ops.neuron_compile.cross_entropy.default

# ``as_strided`` under another name: Torch-MLIR's importer rewrites that one by itself.
torch.library.define(
    "neuron_compile::as_strided",
    "(Tensor a, int[] size, int[] stride, int? storage_offset=None) -> Tensor",
)
as_strided = torch.ops.neuron_compile.as_strided.default

SEED = "rng_seed"

#: Argument of a convolution that is to have its channels last in memory.
CHANNELS_LAST = "channels_last"


def prepare(module: fx.GraphModule) -> None:
    """Run every pass over ``module`` in place."""
    graph = module.graph
    clamp_slices(graph)
    absorb_transposes(graph)
    lay_out_convolutions(graph)
    join_cross_entropies(graph)
    for node in graph.find_nodes(op="call_function", target=aten.as_strided.default):
        node.target = as_strided
    graph.eliminate_dead_code(lambda node: node.is_impure() or is_check(node))
    for node in graph.nodes:
        if isinstance(node.target, Functional | Region):
            # Torch-MLIR's importer knows two kinds of targets, which have such operators.
            node.meta[CALLED], node.target = node.target, node.target.op


def clamp_slices(graph: fx.Graph) -> None:
    """Clamp the bounds of slices to the real size.

    Torch-MLIR allocates until memory ends on the open end 2**63 - 1 of a ``slice_scatter``.
    """
    for op, first in ((aten.slice.Tensor, 1), (aten.slice_scatter.default, 2)):
        for node in graph.find_nodes(op="call_function", target=op):
            _clamp_slice(node, first)


def _clamp_slice(node: fx.Node, first: int) -> None:
    size = result_tensors(node.args[0])[0].shape  # type: ignore[arg-type]
    dim = _argument(node, first, "dim", 0)
    extent = int(size[dim])
    step = _argument(node, first + 3, "step", 1)
    start = _bound(_argument(node, first + 1, "start", None), 0, extent)
    end = max(start, _bound(_argument(node, first + 2, "end", None), extent, extent))
    node.args = (*node.args[:first], dim, start, end, step)
    node.kwargs = {}


def _argument(node: fx.Node, position: int, name: str, default: Any) -> Any:
    if position < len(node.args):
        return node.args[position]
    return node.kwargs.get(name, default)


def _bound(value: int | None, default: int, extent: int) -> int:
    if value is None or value == sys.maxsize:
        return default if value is None else extent
    return min(max(value + extent if value < 0 else value, 0), extent)


def absorb_transposes(graph: fx.Graph) -> None:
    """Turn matrix products into ``gemm`` nodes that read transposed operands in place."""
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in (aten.mm.default, aten.bmm.default):
            _to_gemm(graph, node, node.args[0], node.args[1], None)
        elif node.target is aten.addmm.default and _unscaled(node):
            _to_gemm(graph, node, node.args[1], node.args[2], node.args[0])


def _unscaled(node: fx.Node) -> bool:
    return bool(_argument(node, 3, "beta", 1) == _argument(node, 4, "alpha", 1) == 1)


def _to_gemm(graph: fx.Graph, node: fx.Node, a: Any, b: Any, bias: Any) -> None:
    (result,) = result_tensors(node)
    if not result.dtype.is_floating_point:
        return
    if bias is not None and result_tensors(bias)[0].dtype != result.dtype:
        return
    a, transpose_a = _untransposed(a)
    b, transpose_b = _untransposed(b)
    with graph.inserting_before(node):
        half = result.dtype in (torch.float16, torch.bfloat16)
        if bias is not None and half:
            product = graph.call_function(gemm_bias, (a, b, bias, transpose_a, transpose_b))
        else:
            product = graph.call_function(gemm, (a, b, transpose_a, transpose_b))
        product.meta = {**node.meta, ORIGIN: node.name}
        replacement = product
        if bias is not None and not half:
            replacement = graph.call_function(aten.add.Tensor, (product, bias))
            replacement.meta = {**node.meta, ORIGIN: node.name}
    node.replace_all_uses_with(replacement)
    graph.erase_node(node)


def _untransposed(node: fx.Node) -> tuple[fx.Node, bool]:
    """Look through a transposition of the last two dimensions."""
    rank = result_tensors(node)[0].dim()
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return node, False
    swapped = [*range(rank - 2), rank - 1, rank - 2]
    if node.target is aten.permute.default:
        dims = [dim % rank for dim in node.args[1]]  # type: ignore[union-attr, operator]
        return (source, True) if dims == swapped else (node, False)
    if node.target is aten.t.default and rank == 2:
        return source, True
    if node.target is aten.transpose.int:
        dims = sorted(dim % rank for dim in node.args[1:])  # type: ignore[operator]
        if dims == [rank - 2, rank - 1]:
            return source, True
    return node, False


def join_cross_entropies(graph: fx.Graph) -> None:
    """Join a logarithmic softmax of float32 or float64 with the loss that alone reads it."""
    for loss in graph.find_nodes(op="call_function", target=aten.nll_loss_forward.default):
        softmax = loss.args[0]
        if softmax.target is not aten._log_softmax.default or len(softmax.users) > 1:
            continue
        x, dim, half_to_float = softmax.args
        (tensor,) = result_tensors(x)
        last = dim % tensor.dim() == tensor.dim() - 1 if tensor.dim() else False
        if half_to_float or not last or tensor.dtype not in (torch.float32, torch.float64):
            continue
        loss.target = cross_entropy
        loss.args = (x, *loss.args[1:])


def lay_out_convolutions(graph: fx.Graph) -> None:
    """Let two-dimensional convolutions have channels last, unless the graph is one for training.

    Vendors' kernels are faster there, and XLA lets what lies between convolutions take their
    layout. What a forward saves crosses to the backward with channels second: each such tensor
    would be transposed twice, and the vendor's kernels convert weights that change anyway.
    """
    nodes = graph.find_nodes(op="call_function", target=aten.convolution.default)
    returned = set(graph.output_node().all_input_nodes)
    saved = [node for node in nodes if node.args[0] in returned]
    backward = graph.find_nodes(op="call_function", target=aten.convolution_backward.default)
    if backward or 2 * len(saved) > len(nodes):
        return
    for node in nodes:
        if result_tensors(node)[0].dim() == 4:
            node.kwargs = {**node.kwargs, CHANNELS_LAST: True}


def seed_random_operators(module: fx.GraphModule) -> bool:
    """Give each random operator its stream of a seed that arrives as one more placeholder.

    The placeholder ``rng_seed`` is an ``int64[2]`` tensor: the call's seed, and zero. Returns
    whether the graph has random operators at all. Those that have a seed of their own keep it.
    """
    graph = module.graph
    for node in graph.nodes:
        if isinstance(node.target, Seeded):
            node.target = node.target.op
    nodes = [
        node
        for node in graph.nodes
        if node.op == "call_function"
        and SEED_ARGUMENT not in node.kwargs
        and (entry := lookup(node.target))
        and entry.random
    ]
    if not nodes:
        return False
    last = graph.find_nodes(op="placeholder")
    anchor = last[-1] if last else None
    where = graph.inserting_after(anchor) if anchor else graph.inserting_before(nodes[0])
    with where:
        seed = graph.placeholder(SEED)
        seed.meta["val"] = torch.empty(2, dtype=torch.int64, device="meta")
    for position, node in enumerate(nodes):
        node.kwargs = {**node.kwargs, SEED_ARGUMENT: seed, "__stream": position}
    return True
