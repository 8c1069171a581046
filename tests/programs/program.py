"""A random program as plain data: its inputs, its lines of Python, its results, its mode."""

from __future__ import annotations

import dataclasses
import linecache
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

#: Inputs need no gradient; some do; some do, but the call is under ``torch.no_grad()``.
PLAIN, GRAD, NO_GRAD = "plain", "grad", "no_grad"
MODES = (PLAIN, GRAD, NO_GRAD)
#: How an input lies in its memory.
LAYOUTS = (
    "contiguous",
    "permuted",
    "offset",
    "stepped",
    "expanded",
    "channels_last",
)
#: An input in the memory of the first: the same tensor, its transpose, all but the first row.
ALIASES = ("same", "transposed", "rest")

Function = Callable[..., tuple[torch.Tensor, ...]]


@dataclasses.dataclass(frozen=True)
class Input:
    """One argument: ``alias`` names its relation to the first input, if it shares its memory.

    ``special`` puts infinities, NaN and negative zero among its values.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    layout: str = "contiguous"
    grad: bool = False
    special: bool = False
    alias: str | None = None


@dataclasses.dataclass(frozen=True)
class Step:
    """A line of the program: an operation of the table, the values it reads, the text itself."""

    text: str
    operation: str = ""
    reads: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Program:
    """Inputs are called ``x0``, ``x1`` ...; ``results`` name what is returned."""

    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    results: tuple[str, ...]
    mode: str = PLAIN

    @property
    def source(self) -> str:
        """The program as a Python function."""
        names = ", ".join(f"x{index}" for index in range(len(self.inputs)))
        lines = [f"def program({names}):", *(f"    {step.text}" for step in self.steps)]
        return "\n".join([*lines, f"    return ({''.join(f'{name}, ' for name in self.results)})"])

    def __str__(self) -> str:
        """As :func:`parsed` takes it, to be pasted into ``regressions.py``."""
        inputs = "".join(f"    {_shown(item)},\n" for item in self.inputs)
        lines = self.source.split("\n", 1)[1].replace("    ", "        ")
        return f'parsed(\n    "{self.mode}",\n    """\n{lines}\n    """,\n{inputs})'


def _shown(item: Input) -> str:
    fields = dataclasses.fields(Input)[1:]
    given = [(f.name, getattr(item, f.name)) for f in fields if getattr(item, f.name) != f.default]
    return (
        ", ".join(["Input(" + repr(item.shape), *(f"{name}={value!r}" for name, value in given)])
        + ")"
    )


def parsed(mode: str, source: str, *inputs: Input) -> Program:
    """A program from its lines, the last of which is ``return (a, b, )``."""
    lines = [line.strip() for line in source.strip().splitlines()]
    last = lines.pop().removeprefix("return").strip(" ()")
    results = tuple(name.strip() for name in last.split(",") if name.strip())
    return Program(inputs, tuple(Step(line) for line in lines), results, mode)


def function(source: str) -> Function:
    """The function that a source text defines."""
    name = f"<program {hash(source):x}>"
    scope: dict[str, Any] = {"torch": torch, "F": F}
    # Dynamo shows the line that it traces.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), scope)
    return scope["program"]


def widened(program: Program) -> Program:
    """The program in float64."""

    def text(line: str) -> str:
        for narrow in ("bfloat16", "float16", "float32"):
            line = line.replace(f"torch.{narrow}", "torch.float64")
        return line

    inputs = [
        dataclasses.replace(item, dtype=torch.float64) if item.dtype.is_floating_point else item
        for item in program.inputs
    ]
    steps = [dataclasses.replace(step, text=text(step.text)) for step in program.steps]
    return dataclasses.replace(program, inputs=tuple(inputs), steps=tuple(steps))


def arguments(inputs: Sequence[Input], call: int) -> list[torch.Tensor]:
    """Fresh tensors, with other values in each call.

    Floats are quarters from -2 to 2: what is added and multiplied of few of them is exact, so
    that programs may branch on it.
    """
    generator = torch.Generator().manual_seed(1000 + call)
    made: list[torch.Tensor] = []
    for item in inputs:
        if item.alias is not None and made:
            made.append(_related(made[0], item.alias))
        else:
            made.append(_tensor(item, generator))
    return made


def _related(first: torch.Tensor, alias: str) -> torch.Tensor:
    with torch.no_grad():
        if alias == "same":
            return first
        return first.mT if alias == "transposed" and first.dim() > 1 else first[1:]


def _tensor(item: Input, generator: torch.Generator) -> torch.Tensor:
    dense = _values(item, generator)
    laid_out = _laid_out(dense, item.layout)
    assert laid_out.shape == item.shape and laid_out.dtype == item.dtype
    return laid_out.requires_grad_(item.grad)


def _values(item: Input, generator: torch.Generator) -> torch.Tensor:
    if item.dtype == torch.bool:
        return torch.randint(0, 2, item.shape, generator=generator).bool()
    if not item.dtype.is_floating_point:
        low = 0 if item.dtype == torch.uint8 else -4
        return torch.randint(low, 6, item.shape, generator=generator).to(item.dtype)
    values = torch.randint(-8, 9, item.shape, generator=generator).to(item.dtype) / 4
    if item.special:
        kinds = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0], dtype=item.dtype)
        which = torch.randint(0, 12, item.shape, generator=generator)
        values = torch.where(which < 4, kinds[which.clamp(max=3)], values)
    return values


def _laid_out(dense: torch.Tensor, layout: str) -> torch.Tensor:
    """The values in other strides. What a layout does not fit stays contiguous."""
    dims = dense.dim()
    if layout == "permuted" and dims > 1:
        return dense.permute(*reversed(range(dims))).contiguous().permute(*reversed(range(dims)))
    if layout == "channels_last" and dims == 4:
        return dense.contiguous(memory_format=torch.channels_last)
    if layout == "offset" and dims:
        base = dense.new_zeros(dense.shape[0] + 3, *dense.shape[1:])
        base[1 : 1 + dense.shape[0]] = dense
        return base[1 : 1 + dense.shape[0]]
    if layout == "stepped" and dims:
        base = dense.new_zeros(*dense.shape[:-1], 2 * dense.shape[-1] + 1)
        base[..., 1::2] = dense
        return base[..., 1::2]
    if layout == "expanded" and dims and dense.shape[0]:
        return dense[:1].clone().expand(dense.shape)
    return dense
