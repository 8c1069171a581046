"""The strategy: programs whose every step eager takes, by running each while it is drawn."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from .program import ALIASES, GRAD, LAYOUTS, MODES, NO_GRAD, PLAIN, Input, Program, Step, arguments

Draw = Callable[[st.SearchStrategy[Any]], Any]
T = TypeVar("T")

#: Magnitudes beyond which rounding would be felt, and elements beyond which it takes long.
LIMITS = {torch.float64: 500.0, torch.float32: 500.0, torch.bfloat16: 32.0, torch.float16: 32.0}
EXACT_LIMIT, INTEGER_LIMIT, ELEMENTS = 8192.0, 1 << 40, 3000
MOST_STEPS = 16
SIZES = (3, 2, 4, 5, 1, 6, 8, 0, 17)
#: Inputs' dtypes, the more frequent first.
DTYPES = (
    *(torch.float32,) * 6,
    *(torch.int64,) * 2,
    *(torch.float64,) * 2,
    *(torch.bool,) * 2,
    *(torch.bfloat16,) * 2,
    torch.float16,
    torch.uint8,
    torch.int32,
)


class Unavailable(Exception):
    """No value of the program so far suits the operation."""


@dataclasses.dataclass(frozen=True)
class Value:
    """A value of the program being drawn, under its name."""

    name: str
    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""
        return tuple(self.tensor.shape)

    @property
    def dim(self) -> int:
        """Its rank."""
        return self.tensor.dim()

    @property
    def floating(self) -> bool:
        """Whether it holds floats."""
        return self.tensor.is_floating_point()

    @property
    def integral(self) -> bool:
        """Whether it holds integers (no bools)."""
        return not self.floating and self.tensor.dtype != torch.bool


@dataclasses.dataclass(frozen=True)
class Code:
    """A line to be: ``{0}`` stands for the first of ``reads``.

    ``exact`` says that an exact result follows from exact operands. A statement gives no value;
    ``writes`` is the position of the operand that it, or an in-place method, changes.
    """

    text: str
    reads: tuple[Value, ...]
    exact: bool = True
    statement: bool = False
    writes: int | None = None


class Pool:
    """The values of the program being drawn, and the means to draw what an operation needs."""

    def __init__(self, draw: Draw, inputs: Sequence[Input], mode: str) -> None:
        self.draw = draw
        self.mode = mode
        tensors = arguments(inputs, 0)
        self.values = [Value(f"x{index}", tensor) for index, tensor in enumerate(tensors)]
        self.steps: list[Step] = []
        self.full = False
        self._rounded: set[int] = set()

    # ------------------------------------------------------------------ what operations draw

    def pick(self, *conditions: Callable[[Value], bool]) -> Value:
        """One of the values that meet the conditions."""
        fit = [value for value in self.values if all(test(value) for test in conditions)]
        if not fit:
            raise Unavailable
        return self.one_of(fit)

    def one_of(self, items: Sequence[T]) -> T:
        """One of the items; a failing program shrinks towards the first."""
        return items[self.integer(0, len(items) - 1)]

    def integer(self, low: int, high: int) -> int:
        """An integer between the two, both included."""
        return low + _below(self.draw, high - low + 1)

    def chance(self) -> bool:
        """Heads or tails."""
        return self.draw(st.booleans())

    def dim(self, value: Value, new: int = 0) -> int:
        """A dimension of the value, counted from the front or the back."""
        rank = value.dim + new
        if not rank:
            raise Unavailable
        return self.integer(0, rank - 1) - self.one_of([0, rank])

    def number(self, value: Value) -> str:
        """A small scalar for arithmetic with the value that does not change its dtype."""
        if value.floating:
            return self.one_of(["1.0", "0.5", "-2.0", "2", "-0.25", "3", "0.0"])
        if value.tensor.dtype == torch.bool:
            return self.one_of(["True", "False"])
        return self.one_of(["1", "2", "3", "0"] + ["-2"] * (value.tensor.dtype != torch.uint8))

    def exact(self, value: Value) -> bool:
        """Whether its values are the same however they are computed."""
        return value.tensor.untyped_storage()._cdata not in self._rounded

    def smooth(self, value: Value) -> bool:
        """Whether a kink (of ``abs``, of a maximum) cannot make gradients differ."""
        return self.mode != GRAD or self.exact(value)

    def partner(self, value: Value, *conditions: Callable[[Value], bool]) -> Value:
        """A value that broadcasts with this one."""
        return self.pick(lambda other: _broadcasts(value.shape, other.shape), *conditions)

    def source(self, value: Value, *conditions: Callable[[Value], bool]) -> Value:
        """A value that can be written to this one: broadcast to it, in other memory."""
        memory = value.tensor.untyped_storage()._cdata
        return self.pick(
            lambda other: (
                other.dim <= value.dim
                and _broadcasts(value.shape, other.shape) == value.shape
                and other.tensor.untyped_storage()._cdata != memory
            ),
            *conditions,
        )

    def target(self, *conditions: Callable[[Value], bool]) -> Value:
        """A value that may be written in place: no two of its elements are one."""
        return self.pick(lambda value: not _overlaps(value.tensor), *conditions)

    # ---------------------------------------------------------------------------- the program

    def take(self, operation: str, code: Code) -> bool:
        """Run a step and keep it, unless eager refuses it or its values grow too large."""
        scope = {"torch": torch, "F": F, **{value.name: value.tensor for value in self.values}}
        name = f"v{sum(value.name.startswith('v') for value in self.values)}"
        names = tuple(value.name for value in code.reads)
        text = code.text.format(*names)
        exact = code.exact and all(self.exact(value) for value in code.reads)
        if not code.statement:
            text = f"{name} = {text}"
        try:
            exec(text, scope)
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
            return False
        made = scope.get(name)
        if not code.statement and not isinstance(made, torch.Tensor):
            return False
        changed = code.reads[code.writes].tensor if code.writes is not None else made
        assert isinstance(changed, torch.Tensor)
        exact = exact and _is_exact(changed)
        if not (exact or _fits(changed)) or changed.numel() > ELEMENTS:
            # What was done in place cannot be undone.
            self.full = code.writes is not None
            return False
        if not exact:
            # Storages are known by their address; the values of the program keep them alive.
            self._rounded.add(changed.untyped_storage()._cdata)
        self.steps.append(Step(text, operation, names))
        if isinstance(made, torch.Tensor):
            self.values.append(Value(name, made))
        return True


def _broadcasts(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...] | None:
    try:
        return tuple(torch.broadcast_shapes(a, b))
    except RuntimeError:
        return None


def _overlaps(tensor: torch.Tensor) -> bool:
    if tensor.is_contiguous():
        return False
    reach: Iterable[int] = [0]
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        reach = [start + stride * index for start in reach for index in range(size)]
    offsets = list(reach)
    return len(set(offsets)) < len(offsets)


def _is_exact(tensor: torch.Tensor) -> bool:
    """Whether sums and products of a few such numbers do not round, in float32 at least."""
    if not tensor.is_floating_point():
        return not tensor.numel() or bool(tensor.to(torch.int64).abs().max() < INTEGER_LIMIT)
    wide = tensor.detach().double()
    wide = wide[wide.isfinite()] * 1024
    return bool(((wide == wide.round()) & (wide.abs() < 1024 * EXACT_LIMIT)).all())


def _fits(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point():
        return False
    finite = tensor.detach()[tensor.detach().isfinite()]
    return not finite.numel() or float(finite.abs().max()) <= LIMITS.get(tensor.dtype, 0.0)


# ------------------------------------------------------------------------------------ strategy


def _below(draw: Draw, count: int) -> int:
    """One of the first ``count`` integers, made of bits.

    An integer of hypothesis' own comes at times from the source files of the modules that happen
    to be imported, so that a seed would not stand for one stream.
    """
    number = 0
    for _ in range((count - 1).bit_length()):
        number = 2 * number + draw(st.booleans())
    return number % count


def _some(draw: Draw, items: Sequence[T], most: int) -> list[T]:
    """Up to ``most`` of the items, each led by its own "go on", which hypothesis can drop."""
    found: list[T] = []
    while len(found) < most and _below(draw, 4):
        found.append(items[_below(draw, len(items))])
    return found


@st.composite
def programs(draw: Draw) -> Program:
    """Programs that eager takes step by step (a backward may still fail)."""
    from .operations import OPERATIONS

    mode = MODES[_below(draw, len(MODES))]
    inputs = _inputs(draw, mode)
    pool = Pool(draw, inputs, mode)
    with warnings.catch_warnings(), torch.set_grad_enabled(mode == GRAD):
        warnings.simplefilter("ignore")
        while not pool.full and len(pool.steps) < MOST_STEPS and _below(draw, 16):
            name = pool.one_of(tuple(OPERATIONS))
            try:
                code = OPERATIONS[name](pool)
            except Unavailable:
                continue
            pool.take(name, code)
    values = [value.name for value in pool.values]
    # Of most programs everything is compared; some leave XLA room to fuse.
    if _below(draw, 4):
        return Program(inputs, tuple(pool.steps), tuple(values), mode)
    return Program(inputs, tuple(pool.steps), (values[-1], *_some(draw, values, 5)), mode)


def _inputs(draw: Draw, mode: str) -> tuple[Input, ...]:
    sizes = [SIZES[_below(draw, len(SIZES))], *_some(draw, SIZES, 2), 1]
    made: list[Input] = []
    for index in range(1 + _below(draw, 3)):
        shape = tuple(_some(draw, sizes, 3 if index else 4))
        dtype = DTYPES[_below(draw, len(DTYPES))]
        if math.prod(shape) > ELEMENTS / 4:
            shape = shape[:2]
        # Most are contiguous, without surprises, and of their own memory.
        layout = LAYOUTS[max(0, _below(draw, 2 * len(LAYOUTS)) - len(LAYOUTS))]
        special = mode == PLAIN and dtype.is_floating_point and _below(draw, 8) == 7
        alias = None
        if index and mode == PLAIN and made[0].shape and _below(draw, 16) == 15:
            alias = ALIASES[_below(draw, len(ALIASES))]
        grad = mode in (GRAD, NO_GRAD) and dtype.is_floating_point
        if grad and any(item.grad for item in made):
            grad = bool(draw(st.booleans()))
        made.append(Input(shape, dtype, layout, grad, special, alias))
    if mode in (GRAD, NO_GRAD) and not any(item.grad for item in made):
        made[0] = dataclasses.replace(made[0], dtype=torch.float32, grad=True)
    return tuple(made)
