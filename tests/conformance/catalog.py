"""What there is to check: entries of ``op_db`` and ``module_db``, their dtypes and samples."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

DTYPES = {
    name: getattr(torch, name)
    for name in (
        "float32",
        "float64",
        "bfloat16",
        "float16",
        "int64",
        "int32",
        "uint8",
        "bool",
        "complex64",
    )
}
#: Gradients are compared in these.
TRAINED = ("float32", "float64")
INFERENCE, TRAINING, ERRORS = "inference", "training", "errors"
OPERATOR, MODULE = "operator", "module"


@dataclasses.dataclass(frozen=True)
class Case:
    """One entry in one dtype: its values, its gradients too, or its errors."""

    kind: str
    entry: str
    dtype: str
    mode: str

    @property
    def key(self) -> str:
        """The name of the case in results, ``kind:entry:dtype:mode``."""
        return f"{self.kind}:{self.entry}:{self.dtype}:{self.mode}"

    @classmethod
    def of(cls, key: str) -> Case:
        """The case of a key."""
        kind, rest = key.split(":", 1)
        return cls(kind, *rest.rsplit(":", 2))


@dataclasses.dataclass(frozen=True)
class Sample:
    """A call that can be made again: ``make`` builds the callable (a module is built anew).

    ``process`` makes of the results what has a well defined gradient: a singular vector without
    its sign. ``settle`` makes of them what eager's contract fixes: an index among ties is not.
    """

    make: Callable[[], Callable[..., Any]]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    process: Callable[[Any], Any] = lambda results: results
    settle: Callable[[Any], Any] = lambda results: results


@functools.cache
def operators() -> dict[str, Any]:
    """The entries of ``op_db``, by name and variant."""
    from torch.testing._internal import common_methods_invocations as database

    # Entries with random results seed within the call, which Dynamo cannot trace.
    database.wrapper_set_seed = _unseeded
    return {
        op.name + (f".{op.variant_test_name}" if op.variant_test_name else ""): op
        for op in database.op_db
    }


def _unseeded(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


@functools.cache
def modules() -> dict[str, Any]:
    """The entries of ``module_db``, by name."""
    from torch.testing._internal.common_modules import module_db

    return {module.name: module for module in module_db}


def cases(dtypes: Sequence[str] = tuple(DTYPES)) -> Iterator[Case]:
    """Every case of the given dtypes."""
    for name, op in operators().items():
        supported = op.supported_dtypes("cpu")
        for dtype in dtypes:
            if DTYPES[dtype] not in supported:
                continue
            yield Case(OPERATOR, name, dtype, INFERENCE)
            if dtype in TRAINED and op.supports_autograd:
                yield Case(OPERATOR, name, dtype, TRAINING)
        if op.error_inputs_func is not None and "float32" in dtypes:
            yield Case(OPERATOR, name, "float32", ERRORS)
    for name, module in modules().items():
        for dtype in dtypes:
            if dtype in TRAINED and DTYPES[dtype] in module.supported_dtypes("cpu"):
                yield Case(MODULE, name, dtype, INFERENCE)
                yield Case(MODULE, name, dtype, TRAINING)


def samples(case: Case, limit: int | None = None) -> list[Sample]:
    """The samples of a case, or ``limit`` of them spread from the first to the last."""
    torch.manual_seed(0)
    find = _operator_samples if case.kind == OPERATOR else _module_samples
    found = list(find(case))
    if limit is None or len(found) <= limit:
        return found
    last = len(found) - 1
    return [found[round(last * i / (limit - 1))] for i in range(limit)]


def _operator_samples(case: Case) -> Iterator[Sample]:
    op = operators()[case.entry]
    if case.mode == ERRORS:
        made = (error.sample_input for error in op.error_inputs("cpu"))
    else:
        made = op.sample_inputs("cpu", DTYPES[case.dtype], requires_grad=case.mode == TRAINING)
    for sample in made:
        yield Sample(
            lambda: op.op,
            (sample.input, *sample.args),
            dict(sample.kwargs),
            sample.output_process_fn_grad,
            functools.partial(_without_ties, sample, _SETTLE[case.entry])
            if case.entry in _SETTLE
            else lambda results: results,
        )


def _without_ties(sample: Any, position: int, results: Any) -> Any:
    """Indices as the values that they lead to, for ATen takes any of a tie."""
    values, index = results if isinstance(results, tuple) else (None, results)
    x, arguments = sample.input.detach(), sample.args[position:]
    if x.ndim == 0 or sample.kwargs.get("stable"):
        return results
    axis = arguments[0] if arguments else sample.kwargs.get("dim", -1)
    kept = index if index.ndim == x.ndim else index.unsqueeze(axis)
    led_to = x.gather(axis, kept).reshape(index.shape)
    if (arguments[2:3] or [sample.kwargs.get("sorted", True)])[0] is False:
        led_to, values = led_to.sort(axis)[0], values.sort(axis)[0]
    return values, led_to


#: Entries that return indices, and where their ``dim`` stands after the input.
_SETTLE = {"kthvalue": 1, "topk": 1, "mode": 0, "sort": 0, "argsort": 0}


def _module_samples(case: Case) -> Iterator[Sample]:
    info, dtype = modules()[case.entry], DTYPES[case.dtype]
    training = case.mode == TRAINING
    for made in info.module_inputs_func(
        info, device="cpu", dtype=dtype, requires_grad=training, training=training
    ):
        if made.forward_input is None:
            continue
        yield Sample(
            functools.partial(_build, info.module_cls, made.constructor_input, dtype, training),
            tuple(made.forward_input.args),
            dict(made.forward_input.kwargs),
        )


def _build(module_class: Any, arguments: Any, dtype: torch.dtype, training: bool) -> Any:
    torch.manual_seed(1)
    module = module_class(*arguments.args, **arguments.kwargs).to(dtype)
    return module.train(training).requires_grad_(training)


def copied(tree: Any) -> Any:
    """Independent copies of every tensor, laid out the same."""
    return pytree.tree_map(_copy, tree)


def _copy(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    lazy = leaf.is_conj() or leaf.is_neg() or leaf.is_quantized
    if lazy or leaf.layout is not torch.strided or leaf.device.type != "cpu":
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)
    storage = leaf.untyped_storage().clone()
    copy = torch.empty(0, dtype=leaf.dtype)
    copy.set_(storage, leaf.storage_offset(), leaf.shape, leaf.stride())
    return copy.requires_grad_(leaf.requires_grad)
