"""Views, other rearrangements, joins and new tensors."""

from __future__ import annotations

import math

import torch

from ..generate import Code, Pool, Unavailable, Value
from .table import boolean, floating, full, numeric, operation, ranked, same_dtype


def _factors(pool: Pool, count: int) -> tuple[int, ...]:
    """Sizes of a tensor of so many elements."""
    sizes = []
    while count > 1 and len(sizes) < 3:
        divisors = [n for n in range(1, count + 1) if count % n == 0]
        size = pool.one_of([count, *divisors])
        sizes.append(size)
        count //= size
    return (*sizes, count)


def slices(pool: Pool, value: Value) -> str:
    """An index of slices, integers, new axes and an ellipsis; negative ones among them."""
    parts: list[str] = []
    for size in value.shape:
        kind = pool.one_of(["slice", "all", "integer" if size else "all", "end", "new"])
        if kind == "integer":
            parts.append(str(pool.integer(-size, size - 1)))
        elif kind == "slice":
            start, step = pool.integer(0, 2), pool.one_of(["", ":2", ":3"])
            parts.append(f"{start or ''}:{pool.one_of(['', '-1', '3'])}{step}")
        elif kind == "new":
            parts += ["None", ":"]
        else:
            parts.append(":" if kind == "all" else "...")
            if kind == "end":
                break
    return ", ".join(parts) or "..."


@operation
def index_with_slices(pool: Pool) -> Code:
    a = pool.pick()
    return Code(f"{{0}}[{slices(pool, a)}]", (a,))


@operation
def select(pool: Pool) -> Code:
    a = pool.pick(full, ranked(1))
    dim = pool.dim(a)
    return Code(f"{{0}}.select({dim}, {pool.integer(-a.shape[dim], a.shape[dim] - 1)})", (a,))


@operation
def narrow(pool: Pool) -> Code:
    a = pool.pick(ranked(1))
    dim = pool.dim(a)
    start = pool.integer(0, a.shape[dim])
    length = pool.integer(0, a.shape[dim] - start)
    return Code(f"{{0}}.narrow({dim}, {start}, {length})", (a,))


@operation
def reshape(pool: Pool) -> Code:
    a = pool.pick(full)
    sizes = list(_factors(pool, a.tensor.numel()))
    if pool.chance():
        sizes[pool.integer(0, len(sizes) - 1)] = -1
    return Code(f"{{0}}.{pool.one_of(['reshape', 'view'])}({sizes})", (a,))


@operation
def flatten(pool: Pool) -> Code:
    a = pool.pick()
    return Code(pool.one_of(["{0}.flatten()", "{0}.reshape(-1)", "{0}.ravel()"]), (a,))


@operation
def permute(pool: Pool) -> Code:
    a = pool.pick(ranked(2))
    order = list(range(a.dim))
    for index in range(a.dim - 1):
        other = pool.integer(index, a.dim - 1)
        order[index], order[other] = order[other], order[index]
    return Code(f"{{0}}.permute({order})", (a,))


@operation
def transpose(pool: Pool) -> Code:
    a = pool.pick(ranked(2))
    names = ["{0}.transpose(0, -1)", "{0}.mT", "{0}.swapaxes(0, 1)", "{0}.movedim(0, -1)"]
    return Code(pool.one_of(names), (a,))


@operation
def expand(pool: Pool) -> Code:
    a = pool.pick()
    sizes = [pool.one_of([3, 2, 5]) if size == 1 else -1 for size in a.shape]
    return Code(f"{{0}}.expand({[*[2] * pool.chance(), *sizes]})", (a,))


@operation
def unsqueeze(pool: Pool) -> Code:
    a = pool.pick(ranked(0, 4))
    return Code(f"{{0}}.unsqueeze({pool.dim(a, new=1)})", (a,))


@operation
def squeeze(pool: Pool) -> Code:
    a = pool.pick()
    return Code("{0}.squeeze(%s)" % (pool.dim(a) if a.dim and pool.chance() else ""), (a,))


@operation
def diagonal(pool: Pool) -> Code:
    a = pool.pick(ranked(2))
    return Code(f"{{0}}.diagonal({pool.integer(-1, 1)}, {pool.one_of(['0, 1', '-2, -1'])})", (a,))


@operation
def unfold(pool: Pool) -> Code:
    a = pool.pick(ranked(1), full)
    dim = pool.dim(a)
    size = pool.integer(1, min(3, a.shape[dim]))
    return Code(f"{{0}}.unfold({dim}, {size}, {pool.integer(1, 2)})", (a,))


@operation
def as_strided(pool: Pool) -> Code:
    a = pool.pick(full)
    memory = a.tensor.untyped_storage().nbytes() // a.tensor.element_size()
    offset = a.tensor.storage_offset()
    if memory - offset < 4:
        raise Unavailable
    text = pool.one_of(["(2, 2), (1, 2)", "(2, 2), (2, 1)", "(3,), (1,)", "(2, 3), (0, 1)"])
    return Code(f"{{0}}.as_strided({text}, {offset})", (a,))


@operation
def piece(pool: Pool) -> Code:
    """One of the views that a split gives."""
    a = pool.pick(ranked(1), full)
    dim = pool.dim(a)
    text = pool.one_of(
        [
            f"torch.chunk({{0}}, 2, {dim})[-1]",
            f"torch.split({{0}}, 2, {dim})[-1]",
            f"torch.unbind({{0}}, {dim})[{pool.integer(0, a.shape[dim] - 1)}]",
            f"torch.tensor_split({{0}}, 3, {dim})[1]",
        ]
    )
    return Code(text, (a,))


@operation
def view_as_another_dtype(pool: Pool) -> Code:
    a = pool.pick(pool.exact, ranked(1), full, lambda value: not value.tensor.requires_grad)
    # Not of bool: what a write through the view leaves may be no bool, and undefined.
    to = {torch.int8: "uint8", torch.int64: "int32"}
    if a.tensor.dtype not in to:
        raise Unavailable
    return Code(f"{{0}}.view(torch.{to[a.tensor.dtype]})", (a,))


@operation
def copy(pool: Pool) -> Code:
    a = pool.pick()
    names = ["clone()", "contiguous()", "detach()", "alias()", "detach().clone()"]
    if a.dim == 4:
        names += ["contiguous(memory_format=torch.channels_last)"]
    name = pool.one_of(names)
    if name == "alias()":
        return Code("{0}.view_as({0})", (a,))
    return Code(f"{{0}}.{name}", (a,))


@operation
def flip(pool: Pool) -> Code:
    a = pool.pick(ranked(1))
    dim = pool.dim(a)
    text = [f"flip({dim})", f"roll({pool.integer(-2, 3)}, {dim})", "roll(1)"]
    if a.dim > 1:
        text += ["rot90()", "fliplr()"]
    return Code(f"{{0}}.{pool.one_of(text)}", (a,))


@operation
def repeat(pool: Pool) -> Code:
    a = pool.pick(ranked(1, 3))
    times = [pool.integer(1, 2) for _ in range(a.dim)]
    text = [f"{{0}}.repeat({times})", f"{{0}}.tile({times})"]
    text += [f"{{0}}.repeat_interleave(2, dim={pool.dim(a)})"]
    return Code(pool.one_of(text), (a,))


@operation
def triangle(pool: Pool) -> Code:
    a = pool.pick(ranked(2))
    return Code(f"{{0}}.{pool.one_of(['tril', 'triu'])}({pool.integer(-1, 1)})", (a,))


@operation
def diag_embed(pool: Pool) -> Code:
    a = pool.pick(ranked(1, 2))
    return Code(pool.one_of(["torch.diag_embed({0})", "torch.diag_embed({0}, 1, 0, -1)"]), (a,))


@operation
def pad(pool: Pool) -> Code:
    a = pool.pick(ranked(1, 4), numeric)
    modes = ["'constant', 2"]
    if a.floating and a.dim in (2, 3):
        modes += ["'reflect'", "'replicate'", "'circular'"]
    return Code(f"F.pad({{0}}, ({pool.integer(0, 2)}, 1), {pool.one_of(modes)})", (a,))


@operation
def cat(pool: Pool) -> Code:
    a = pool.pick(ranked(1))
    dim = pool.dim(a)

    def fits(b: Value) -> bool:
        axis = dim % a.dim
        others = [n for i, n in enumerate(b.shape) if i != axis]
        return b.dim == a.dim and others == [n for i, n in enumerate(a.shape) if i != axis]

    b = pool.pick(fits)
    order = pool.one_of(["{0}, {1}", "{1}, {0}", "{0}, {1}, {0}"])
    return Code(f"torch.cat([{order}], {dim})", (a, b))


@operation
def stack(pool: Pool) -> Code:
    a = pool.pick(ranked(0, 3))
    b = pool.pick(lambda value: value.shape == a.shape)
    return Code(f"torch.stack([{{0}}, {{1}}], {pool.dim(a, new=1)})", (a, b))


@operation
def stack_flat(pool: Pool) -> Code:
    a = pool.pick(ranked(0, 3))
    b = pool.pick(same_dtype(a), lambda value: value.shape == a.shape)
    return Code(f"torch.{pool.one_of(['hstack', 'vstack', 'dstack'])}([{{0}}, {{1}}])", (a, b))


@operation
def meshgrid(pool: Pool) -> Code:
    a = pool.pick(ranked(1, 1))
    b = pool.pick(ranked(1, 1), same_dtype(a))
    return Code(f"torch.meshgrid({{0}}, {{1}}, indexing='ij')[{pool.integer(0, 1)}]", (a, b))


@operation
def new(pool: Pool) -> Code:
    """A tensor of constants."""
    a = pool.pick()
    if pool.chance():
        size = list(a.shape)
        name = pool.one_of(["torch.zeros", "torch.ones"])
        dtype = str(a.tensor.dtype)
        return Code(f"{name}({size}, dtype={dtype})", ())
    names = ["torch.zeros_like({0})", "torch.ones_like({0})", "{0}.new_zeros((2, 3))"]
    if not boolean(a):
        names += [f"torch.full_like({{0}}, {pool.number(a)})"]
    return Code(pool.one_of(names), (a,))


@operation
def constant(pool: Pool) -> Code:
    texts = [
        f"torch.arange({pool.integer(0, 6)})",
        "torch.arange(0, 3, 0.5)",
        "torch.tensor([0.5, -1.0, 2.0])",
        "torch.tensor([0, 2, -1])",
        "torch.eye(3)",
        "torch.tensor(2.0)",
        "torch.tensor([True, False, True])",
        "torch.linspace(0, 2, 5)",
    ]
    return Code(pool.one_of(texts), ())


@operation
def interpolate(pool: Pool) -> Code:
    a = pool.pick(floating, ranked(3, 4), full, lambda v: math.prod(v.shape) < 300)
    return Code("F.interpolate({0}, scale_factor=2, mode='nearest')", (a,))
