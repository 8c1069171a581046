"""The boundary to ``torch_mlir``: FX graph in, one StableHLO module out.

No other module imports ``torch_mlir``. Tested with torch-mlir 20261001.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch_mlir import ir
from torch_mlir.dialects import func as func_dialect
from torch_mlir.dialects import torch as torch_dialect
from torch_mlir.extras.fx_importer import ContextCache, FxImporter, GraphNodeImporter
from torch_mlir.passmanager import PassManager

from .registry import origin, result_tensors, signature
from .trace import Splice
from .types import CARRIERS, Check, LoweringError, TensorSpec

_TO_BACKEND = "builtin.module(torchdynamo-export-to-torch-backend-pipeline)"
_TO_STABLEHLO = "builtin.module(torch-backend-to-stablehlo-backend-pipeline)"
_CLEAN = "builtin.module(inline,symbol-dce)"

#: Gives a node's splice and its operands, or ``None`` where Torch-MLIR lowers the node itself.
Splicer = Callable[[fx.Node], tuple[Splice, list[fx.Node]] | None]


@dataclasses.dataclass(frozen=True)
class StableHlo:
    """A StableHLO module as text, the Torch dialect it came from, and seconds a phase."""

    text: str
    torch_dialect: str
    phases: Mapping[str, float]
    spliced: int
    checks: tuple[Check, ...]


class _ContextCache(ContextCache):
    """Names each operation's location after its FX node, so that a diagnostic finds its node."""

    def value_info_to_type(self, val: Any, **options: Any) -> ir.Type:
        # The stock version takes FakeTensors alone; passes describe what they add on meta.
        if isinstance(val, torch.Tensor):
            return self.tensor_to_vtensor_type(val)
        return super().value_info_to_type(val, **options)

    def tensor_to_vtensor_type(self, tensor: torch.Tensor) -> ir.Type:
        return self.create_vtensor_type(CARRIERS.get(tensor.dtype, tensor.dtype), tensor.size())

    def get_node_location(self, node: fx.Node) -> ir.Location:
        return ir.Location.name(origin(node), context=self._c)


@dataclasses.dataclass(frozen=True)
class _Imported:
    """What an import met: functions to add, calls of them, codes of checks with their checks."""

    splices: dict[str, Splice] = dataclasses.field(default_factory=dict)
    calls: list[str] = dataclasses.field(default_factory=list)
    codes: list[ir.Value] = dataclasses.field(default_factory=list)
    checks: list[list[Check]] = dataclasses.field(default_factory=list)


def _node_importer(splicer: Splicer, imported: _Imported) -> type[GraphNodeImporter]:
    class SplicingImporter(GraphNodeImporter):
        """Calls a traced function wherever ``splicer`` has one for a node."""

        def _import_torch_op_overload(
            self, loc: ir.Location, node: fx.Node, concrete_target: Any = None
        ) -> None:
            found = splicer(node) if concrete_target is None else None
            if found is None:
                super()._import_torch_op_overload(loc, node, concrete_target)
                return
            self._import_splice(loc, node, *found)

        def _import_hop(self, loc: ir.Location, node: fx.Node, hop: Any) -> None:
            found = splicer(node)
            assert found is not None, "a higher-order operator has no other lowering"
            self._import_splice(loc, node, *found)

        def _import_splice(
            self, loc: ir.Location, node: fx.Node, splice: Splice, operands: list[fx.Node]
        ) -> None:
            imported.splices[splice.entry] = splice
            imported.calls.append(splice.entry)
            with loc:
                self._call(splice, operands, node)

        def _call(self, splice: Splice, operands: list[fx.Node], node: fx.Node) -> None:
            builtin = [
                ir.Operation.create(
                    "torch_c.to_builtin_tensor",
                    results=[ir.Type.parse(spec.mlir_type)],
                    operands=[self._tensor_value(operand)],
                ).result
                for operand, spec in zip(operands, splice.operands, strict=True)
            ]
            codes = [_CODE] if splice.checks else []
            call = func_dialect.CallOp(
                [ir.Type.parse(spec.mlir_type) for spec in (*splice.outputs, *codes)],
                ir.FlatSymbolRefAttr.get(splice.entry),
                builtin,
            )
            if splice.checks:
                imported.codes.append(call.operation.results[-1])
                imported.checks.append([_of_node(check, node) for check in splice.checks])
            value = node.meta.get("val")
            values = value if isinstance(value, tuple | list) else [value]
            if isinstance(value, tuple | list):
                self._multi_result_nodes.add(node)
            results = iter(call.operation.results)
            for position, item in enumerate(values):
                if isinstance(item, torch.Tensor):
                    converted = ir.Operation.create(
                        "torch_c.from_builtin_tensor",
                        results=[self._cc.tensor_to_vtensor_type(item)],
                        operands=[next(results)],
                    ).result
                    self.bind_node_value(node, converted, position)

        def _tensor_value(self, operand: fx.Node) -> ir.Value:
            return self.resolve_node_value(operand)

    return SplicingImporter


def lower_to_stablehlo(graph: fx.Graph, splicer: Splicer, capture_torch: bool) -> StableHlo:
    """Import ``graph`` (functional, static shapes, tensors only), splice, and run both pipelines.

    Args:
        graph: its placeholders and results must be tensors; every node carries ``meta["val"]``.
        splicer: decides node by node between Torch-MLIR's lowering and a traced one.
        capture_torch: keep the Torch dialect's text (costs time on large graphs).

    Raises:
        LoweringError: with the node at fault where Torch-MLIR's diagnostics name it.
    """
    phases: dict[str, float] = {}
    started = time.perf_counter()
    context = ir.Context()
    torch_dialect.register_dialect(context)
    with context:
        _load_stablehlo()
    imported = _Imported()
    importer = FxImporter(
        context=context,
        config_check=False,
        graph_node_importer_cls=_node_importer(splicer, imported),
    )
    importer._cc = _ContextCache(context)
    try:
        main = importer.import_stateless_graph(graph, func_name="main")
    except LoweringError:
        raise
    except Exception as error:
        raise LoweringError(f"Torch-MLIR's importer refused the graph: {error}") from error
    module = importer.module
    phases["import"] = time.perf_counter() - started
    started = time.perf_counter()
    with context:
        if imported.codes:
            _return_code(main, imported)
        for splice in imported.splices.values():
            _add_functions(module, splice)
        phases["splice"] = time.perf_counter() - started
        text = module.operation.get_asm(enable_debug_info=False) if capture_torch else ""
        started = time.perf_counter()
        for pipeline in (_TO_BACKEND, _TO_STABLEHLO, _CLEAN):
            _run(pipeline, module)
    phases["torch_mlir"] = time.perf_counter() - started
    stablehlo = module.operation.get_asm(enable_debug_info=False)
    # The one operation of another dialect that is left; portable modules have none.
    stablehlo = stablehlo.replace(" arith.constant dense", " stablehlo.constant dense")
    checks = tuple(check for checks in imported.checks for check in checks)
    return StableHlo(stablehlo, text, phases, len(imported.calls), checks)


def _load_stablehlo() -> None:
    """A context knows ``stablehlo`` only after a pass that depends on it has run once."""
    empty = ir.Module.parse("module {}")
    PassManager.parse("builtin.module(func.func(convert-torch-to-stablehlo))").run(empty.operation)


#: What a function with checks returns besides its results.
_CODE = TensorSpec((), torch.int32)


def _of_node(check: Check, node: fx.Node) -> Check:
    return Check(check.error, f"{check.message} in {signature(node)}", node.name)


def _return_code(main: Any, imported: _Imported) -> None:
    """Make the first failure of all checks one more result of ``main``: so they stay alive."""
    combine = _combination([len(checks) for checks in imported.checks])
    imported.splices[combine.entry] = combine
    old = main.entry_block.operations[len(main.entry_block.operations) - 1]
    builtin, kind = ir.Type.parse(_CODE.mlir_type), ir.Type.parse("!torch.vtensor<[],si32>")
    with ir.InsertionPoint(old), ir.Location.unknown():
        entry = ir.FlatSymbolRefAttr.get(combine.entry)
        code = func_dialect.CallOp([builtin], entry, imported.codes).operation.results[0]
        result = ir.Operation.create(
            "torch_c.from_builtin_tensor", results=[kind], operands=[code]
        ).result
        func_dialect.ReturnOp([*old.operands, result])
    old.erase()
    results = [*main.type.results, kind]
    main.attributes["function_type"] = ir.TypeAttr.get(
        ir.FunctionType.get(main.type.inputs, results)
    )


def _combination(counts: list[int]) -> Splice:
    """A function of codes, each of so many checks, to the code in the list of all checks."""
    lines = ["%zero = stablehlo.constant dense<0> : tensor<i32>"]
    last, position = "%zero", sum(counts)
    for index in reversed(range(len(counts))):
        position -= counts[index]
        lines += [
            f"%before{index} = stablehlo.constant dense<{position}> : tensor<i32>",
            f"%shifted{index} = stablehlo.add %code{index}, %before{index} : tensor<i32>",
            f"%failed{index} = stablehlo.compare NE, %code{index}, %zero"
            " : (tensor<i32>, tensor<i32>) -> tensor<i1>",
            f"%first{index} = stablehlo.select %failed{index}, %shifted{index}, {last}"
            " : tensor<i1>, tensor<i32>",
        ]
        last = f"%first{index}"
    arguments = ", ".join(f"%code{index}: tensor<i32>" for index in range(len(counts)))
    body = "\n  ".join([*lines, f"return {last} : tensor<i32>"])
    text = f"func.func @neuron_first_failure({arguments}) -> tensor<i32> {{\n  {body}\n}}"
    return Splice(text, "neuron_first_failure", (_CODE,) * len(counts), (_CODE,))


def _add_functions(module: ir.Module, splice: Splice) -> None:
    for operation in ir.Module.parse(splice.text).body.operations:
        copy = operation.operation.clone(ip=ir.InsertionPoint(module.body))
        copy.attributes["sym_visibility"] = ir.StringAttr.get("private")


def _run(pipeline: str, module: ir.Module) -> None:
    context = module.context
    context.emit_error_diagnostics = True
    seen: list[tuple[str, str]] = []

    def collect(diagnostic: Any) -> bool:
        if str(diagnostic.severity).endswith("ERROR"):
            seen.append((str(diagnostic.location), str(diagnostic.message)))
        return True

    handler = context.attach_diagnostic_handler(collect)
    try:
        PassManager.parse(pipeline).run(module.operation)
    except ir.MLIRError as error:
        located = [(str(item.location), item.message) for item in error.error_diagnostics]
        raise _refusal(pipeline, seen + located or [("", str(error))]) from error
    finally:
        handler.detach()
    if seen:
        # Several passes emit an error without failing; their result cannot be trusted.
        raise _refusal(pipeline, seen)


_NODE = re.compile(r'loc\("([^"]+)"')


def _refusal(pipeline: str, diagnostics: list[tuple[str, str]]) -> LoweringError:
    name = next((match[1] for where, _ in diagnostics if (match := _NODE.search(where))), None)
    text = "; ".join(dict.fromkeys(message for _, message in diagnostics))
    return LoweringError(f"Torch-MLIR ({pipeline}) refused the graph: {text}", name)


def output_specs(graph: fx.Graph) -> tuple[TensorSpec, ...]:
    """The specs of a graph's results."""
    (results,) = graph.output_node().args
    return tuple(TensorSpec.of(result_tensors(node)[0]) for node in results)  # type: ignore[union-attr, arg-type]


def input_specs(graph: fx.Graph) -> tuple[TensorSpec, ...]:
    """The specs of a graph's placeholders."""
    return tuple(
        TensorSpec.of(result_tensors(node)[0]) for node in graph.find_nodes(op="placeholder")
    )
