"""Pointwise operations."""

from __future__ import annotations

from collections.abc import Callable

from ..generate import Code, Pool, Value
from .table import (
    below,
    boolean,
    finite,
    floating,
    integral,
    numeric,
    operation,
    same_dtype,
)

#: Functions of one operand: what they need of it, and whether they keep it exact.
SMOOTH: dict[str, tuple[Callable[[Value], bool], ...]] = {
    **{
        f"torch.{n}({{0}})": ()
        for n in ["tanh", "sigmoid", "sin", "cos", "erf", "atan", "asinh", "deg2rad"]
    },
    **{f"torch.{n}({{0}})": (below(6),) for n in ["exp", "expm1", "exp2", "sinh"]},
    **{
        f"F.{n}({{0}})": (floating, below(20))
        for n in ["silu", "gelu", "softplus", "elu", "logsigmoid", "mish", "tanhshrink", "softsign"]
    },
    "F.gelu({0}, approximate='tanh')": (floating,),
}
#: Not differentiable at zero but for the sum.
ROOTS = [f"torch.{n}({{0}}.abs() + 1)" for n in ["sqrt", "log", "rsqrt", "reciprocal", "lgamma"]]
EXACT: dict[str, tuple[Callable[[Value], bool], ...]] = {
    "torch.square({0})": (numeric, below(30)),
    "-{0}": (numeric,),
    "+{0}": (numeric,),
    "~{0}": (lambda value: not value.floating,),
    "torch.isnan({0})": (),
    "{0}.isfinite()": (),
    "torch.nan_to_num({0}, nan=0.5, posinf=2.0, neginf=-2.0)": (),
}
KINKED: dict[str, tuple[Callable[[Value], bool], ...]] = {
    "{0}.abs()": (numeric,),
    "torch.relu({0})": (numeric,),
    "F.leaky_relu({0}, 0.25)": (floating,),
    "F.hardtanh({0}, -0.5, 0.75)": (floating,),
    "F.softshrink({0}, 0.5)": (floating,),
    "F.relu6({0})": (floating,),
}
BRANCHING: dict[str, tuple[Callable[[Value], bool], ...]] = {
    **{f"torch.{n}({{0}})": (floating,) for n in ["floor", "ceil", "round", "trunc", "frac"]},
    "F.hardshrink({0}, 0.5)": (floating,),
    "F.threshold({0}, 0.5, -1.0)": (floating,),
    "torch.sign({0})": (),
    "torch.signbit({0})": (lambda value: not value.floating,),
    "torch.logical_not({0})": (),
    "torch.heaviside({0}, torch.ones_like({0}))": (
        numeric,
        lambda value: not value.tensor.requires_grad,
    ),
}


@operation
def smooth(pool: Pool) -> Code:
    text = pool.one_of(list(SMOOTH))
    return Code(text, (pool.pick(*SMOOTH[text]),), exact=False)


@operation
def root(pool: Pool) -> Code:
    return Code(pool.one_of(ROOTS), (pool.pick(pool.smooth, numeric),), exact=False)


@operation
def exact(pool: Pool) -> Code:
    text = pool.one_of(list(EXACT))
    return Code(text, (pool.pick(*EXACT[text]),))


@operation
def kinked(pool: Pool) -> Code:
    text = pool.one_of(list(KINKED))
    return Code(text, (pool.pick(pool.smooth, *KINKED[text]),))


@operation
def branching(pool: Pool) -> Code:
    text = pool.one_of(list(BRANCHING))
    return Code(text, (pool.pick(pool.exact, *BRANCHING[text]),))


COMPARISONS = ("gt", "ge", "lt", "le", "eq", "ne")


@operation
def add(pool: Pool) -> Code:
    a = pool.pick()
    b = pool.partner(a)
    alpha = pool.one_of(["", "", ", alpha=2"])
    return Code(f"torch.add({{0}}, {{1}}{alpha})", (a, b))


@operation
def sub(pool: Pool) -> Code:
    a = pool.pick(numeric)
    return Code("{0} - {1}", (a, pool.partner(a, numeric)))


@operation
def mul(pool: Pool) -> Code:
    a = pool.pick(below(100))
    return Code("{0} * {1}", (a, pool.partner(a, below(100))))


@operation
def arithmetic_with_a_number(pool: Pool) -> Code:
    a = pool.pick(numeric)
    return Code(
        pool.one_of(["{0} + %s", "{0} * %s", "{0} - %s", "%s - {0}"]) % pool.number(a), (a,)
    )


@operation
def mixed_with_a_number(pool: Pool) -> Code:
    """A float with an integer or bool tensor: the dtype is promoted."""
    return Code(pool.one_of(["{0} + 0.5", "{0} * 1.5", "0.25 - {0}", "{0} * 2"]), (pool.pick(),))


@operation
def div(pool: Pool) -> Code:
    a = pool.pick()
    b = pool.partner(a, pool.smooth, numeric)
    return Code("{0} / ({1}.abs() + 1)", (a, b), exact=False)


@operation
def div_by_a_number(pool: Pool) -> Code:
    return Code(f"{{0}} / {pool.one_of(['3', '2.0', '-0.7', '7'])}", (pool.pick(),), exact=False)


@operation
def div_rounded(pool: Pool) -> Code:
    a = pool.pick(pool.exact, numeric, finite)
    how = pool.one_of(["floor", "trunc"])
    by = pool.one_of(["3", "2", "7", "-4"] if str(a.tensor.dtype) != "torch.uint8" else ["3"])
    return Code(f"torch.div({{0}}, {by}, rounding_mode='{how}')", (a,))


@operation
def floor_divide(pool: Pool) -> Code:
    a = pool.pick(pool.exact, integral)
    b = pool.partner(a, pool.exact, integral)
    return Code("{0} // ({1} * {1} + 1)", (a, b))


@operation
def remainder(pool: Pool) -> Code:
    a = pool.pick(pool.exact, numeric, finite)
    name = pool.one_of(["torch.remainder", "torch.fmod"])
    by = pool.one_of(["3", "2", "-4", "5"] if str(a.tensor.dtype) != "torch.uint8" else ["3"])
    return Code(f"{name}({{0}}, {by})", (a,))


@operation
def remainder_of_tensors(pool: Pool) -> Code:
    a = pool.pick(pool.exact, numeric, finite)
    b = pool.partner(a, pool.exact, numeric, finite)
    name = pool.one_of(["torch.remainder", "torch.fmod"])
    return Code(f"{name}({{0}}, {{1}} * {{1}} + 1)", (a, b))


@operation
def power(pool: Pool) -> Code:
    a = pool.pick(numeric, below(8))
    return Code(f"{{0}} ** {pool.one_of([2, 3, 1, 0])}", (a,), exact=not a.floating)


@operation
def extremum(pool: Pool) -> Code:
    a = pool.pick(pool.smooth)
    b = pool.partner(a, pool.smooth)
    return Code(
        f"torch.{pool.one_of(['maximum', 'minimum', 'fmax', 'fmin'])}({{0}}, {{1}})", (a, b)
    )


@operation
def compare(pool: Pool) -> Code:
    a = pool.pick(pool.exact)
    b = pool.partner(a, pool.exact)
    return Code(f"torch.{pool.one_of(COMPARISONS)}({{0}}, {{1}})", (a, b))


@operation
def compare_with_a_number(pool: Pool) -> Code:
    a = pool.pick(pool.exact)
    return Code(f"{{0}}.{pool.one_of(COMPARISONS)}({pool.one_of(['0', '1', '0.5', '-2'])})", (a,))


@operation
def logical(pool: Pool) -> Code:
    a = pool.pick(pool.exact)
    b = pool.partner(a, pool.exact)
    return Code(f"torch.logical_{pool.one_of(['and', 'or', 'xor'])}({{0}}, {{1}})", (a, b))


@operation
def bitwise(pool: Pool) -> Code:
    a = pool.pick(lambda value: not value.floating)
    b = pool.partner(a, lambda value: not value.floating)
    return Code(pool.one_of(["{0} & {1}", "{0} | {1}", "{0} ^ {1}"]), (a, b))


@operation
def shift(pool: Pool) -> Code:
    a = pool.pick(integral, below(1000))
    return Code(pool.one_of(["{0} << 2", "{0} >> 1", "{0} >> 3"]), (a,))


@operation
def where(pool: Pool) -> Code:
    condition = pool.pick(boolean)
    a = pool.partner(condition)
    if pool.chance():
        return Code(f"torch.where({{0}}, {{1}}, {pool.number(a)})", (condition, a))
    # All three broadcast only if each pair does.
    b = pool.partner(a, lambda other: bool(other.shape == a.shape or other.dim == 0))
    return Code("torch.where({0}, {1}, {2})", (condition, a, b))


@operation
def masked_fill(pool: Pool) -> Code:
    a = pool.pick()
    mask = pool.partner(a, boolean)
    return Code(f"{{0}}.masked_fill({{1}}, {pool.number(a)})", (a, mask))


@operation
def clamp(pool: Pool) -> Code:
    a = pool.pick(pool.smooth, numeric)
    bounds = ["min=0", "max=1", "min=1, max=3"] + ["min=-0.5, max=0.75"] * a.floating
    return Code(f"torch.clamp({{0}}, {pool.one_of(bounds)})", (a,))


@operation
def clamp_by_tensors(pool: Pool) -> Code:
    a = pool.pick(pool.smooth, numeric)
    b = pool.partner(a, pool.smooth, numeric)
    return Code("torch.clamp({0}, max={1})", (a, b))


@operation
def cast(pool: Pool) -> Code:
    a = pool.pick(pool.exact, finite)
    to = ["float32", "float64", "int64", "bool", "int32", "bfloat16", "float16"]
    if not a.floating:
        to += ["uint8", "int8", "int16"]
    return Code(f"{{0}}.to(torch.{pool.one_of(to)})", (a,))


@operation
def cast_float(pool: Pool) -> Code:
    a = pool.pick()
    return Code(f"{{0}}.{pool.one_of(['float', 'double', 'bfloat16'])}()", (a,))


@operation
def lerp(pool: Pool) -> Code:
    a = pool.pick(floating)
    b = pool.partner(a, same_dtype(a))
    return Code(f"torch.lerp({{0}}, {{1}}, {pool.one_of(['0.5', '0.25', '2.0'])})", (a, b))


@operation
def addcmul(pool: Pool) -> Code:
    a = pool.pick(floating, below(100))
    b = pool.partner(a, below(10), same_dtype(a))
    return Code("torch.addcmul({0}, {1}, {1}, value=0.5)", (a, b))


@operation
def atan2(pool: Pool) -> Code:
    a = pool.pick(pool.exact, floating)
    b = pool.partner(a, pool.smooth)
    return Code("torch.atan2({0}, {1}.abs() + 1)", (a, b), exact=False)
