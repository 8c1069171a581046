"""Gathers and scatters that give a new tensor."""

from __future__ import annotations

from ..generate import Code, Pool, Unavailable, Value
from .table import below, boolean, floating, integral, numeric, operation, ranked, same_dtype


def literal(pool: Pool, size: int, distinct: bool = False) -> str:
    """A list of indices, negative ones among them."""
    if not size:
        return "[]"
    count = pool.integer(1, min(4, size) if distinct else 4)
    if distinct:
        first = pool.integer(0, size - 1)
        places = [(first + step) % size for step in range(count)]
    else:
        places = [pool.integer(0, size - 1) for _ in range(count)]
    return str([place - pool.one_of([0, size]) for place in places])


def index(pool: Pool, size: int, *conditions: object, negative: bool = False) -> tuple[str, Value]:
    """An integer value, made an index by its remainder; ``{1}`` stands for it.

    One without dimensions would be a number in Python, which Dynamo cannot trace.
    """
    if not size:
        raise Unavailable
    value = pool.pick(pool.exact, integral, ranked(1), *conditions)  # type: ignore[arg-type]
    text = f"{{1}}.long() % {size}"
    return (f"({text} - {size})" if negative and pool.chance() else f"({text})"), value


def tensor(pool: Pool, size: int, distinct: bool = False) -> str:
    """A literal index as a tensor."""
    return f"torch.tensor({literal(pool, size, distinct)}, dtype=torch.int64)"


def positive(pool: Pool, size: int, distinct: bool = False) -> str:
    """A literal index, as a tensor, for operators that take no negative ones."""
    return f"({tensor(pool, size, distinct)} % {max(size, 1)})"


@operation
def index_select(pool: Pool) -> Code:
    a = pool.pick(ranked(1))
    dim = pool.dim(a)
    if pool.chance():
        return Code(f"torch.index_select({{0}}, {dim}, {positive(pool, a.shape[dim])})", (a,))
    text, value = index(pool, a.shape[dim], ranked(1, 1))
    return Code(f"torch.index_select({{0}}, {dim}, {text})", (a, value))


@operation
def gather(pool: Pool) -> Code:
    a = pool.pick(ranked(1))
    dim = pool.dim(a)

    def fits(other: Value) -> bool:
        pairs = enumerate(zip(other.shape, a.shape, strict=True))
        return other.dim == a.dim and all(m <= n for i, (m, n) in pairs if i != dim % a.dim)

    text, value = index(pool, a.shape[dim], fits)
    return Code(f"torch.gather({{0}}, {dim}, {text})", (a, value))


@operation
def take_along_dim(pool: Pool) -> Code:
    a = pool.pick(ranked(1))
    dim = pool.dim(a)
    text, value = index(pool, a.shape[dim], lambda v: v.dim == a.dim)
    return Code(f"torch.take_along_dim({{0}}, {text}, {dim})", (a, value))


@operation
def take_by_argsort(pool: Pool) -> Code:
    a = pool.pick(ranked(1), pool.exact)
    dim = pool.dim(a)
    text = "torch.take_along_dim({0}, torch.argsort({0}, dim=%d, stable=True), %d)"
    return Code(text % (dim, dim), (a,))


@operation
def advanced(pool: Pool) -> Code:
    a = pool.pick(ranked(1))
    text, value = index(pool, a.shape[0], negative=True)
    return Code(f"{{0}}[{text}]", (a, value))


@operation
def advanced_along_a_later_dim(pool: Pool) -> Code:
    a = pool.pick(ranked(2))
    text, value = index(pool, a.shape[1], negative=True)
    return Code(f"{{0}}[{pool.one_of([':', '1:', 'None, :'])}, {text}]", (a, value))


@operation
def advanced_with_lists(pool: Pool) -> Code:
    a = pool.pick(ranked(1))
    if a.dim == 1 or pool.chance():
        return Code(f"{{0}}[..., {literal(pool, a.shape[-1])}]", (a,))
    size, last = a.shape[0], a.shape[-1]
    if not (size and last):
        raise Unavailable
    pairs = [(pool.integer(-size, size - 1), pool.integer(-last, last - 1)) for _ in range(3)]
    rows, columns = map(list, zip(*pairs, strict=True))
    # With a slice between the two, their dimension comes first.
    middle = ", :" * (a.dim - 2)
    return Code(f"{{0}}[{rows}{middle}, {columns}]", (a,))


@operation
def take(pool: Pool) -> Code:
    a = pool.pick(ranked(1))
    text, value = index(pool, a.tensor.numel())
    return Code(f"torch.take({{0}}, {text})", (a, value))


@operation
def embedding(pool: Pool) -> Code:
    a = pool.pick(ranked(2, 2), floating)
    text, value = index(pool, a.shape[0])
    return Code(f"F.embedding({text}, {{0}})", (a, value))


@operation
def one_hot(pool: Pool) -> Code:
    a = pool.pick(integral, pool.exact, ranked(0, 2))
    return Code("F.one_hot({0}.long() % 5, 5)", (a,))


@operation
def scatter_add(pool: Pool) -> Code:
    a = pool.pick(ranked(1))
    dim = pool.dim(a)
    b = pool.pick(same_dtype(a), lambda v: v.dim == a.dim and _within(v, a, dim))
    if not a.shape[dim]:
        raise Unavailable
    where = f"torch.arange({b.tensor.numel()}).reshape({{1}}.shape) % {a.shape[dim]}"
    return Code(f"torch.scatter_add({{0}}, {dim}, {where}, {{1}})", (a, b))


def _within(inner: Value, outer: Value, but: int) -> bool:
    pairs = enumerate(zip(inner.shape, outer.shape, strict=True))
    return all(m <= n for i, (m, n) in pairs if i != but % outer.dim)


@operation
def scatter_reduce(pool: Pool) -> Code:
    a = pool.pick(ranked(1), numeric, lambda v: not v.tensor.requires_grad)
    dim = pool.dim(a)
    b = pool.pick(same_dtype(a), lambda v: v.dim == a.dim and _within(v, a, dim))
    if not a.shape[dim]:
        raise Unavailable
    where = f"torch.arange({b.tensor.numel()}).reshape({{1}}.shape) % {a.shape[dim]}"
    how = pool.one_of(["sum", "amax", "amin"])
    own = pool.one_of(["", ", include_self=False"])
    return Code(f"torch.scatter_reduce({{0}}, {dim}, {where}, {{1}}, '{how}'{own})", (a, b))


@operation
def index_add(pool: Pool) -> Code:
    a = pool.pick(ranked(1))
    dim = pool.dim(a)
    where = positive(pool, a.shape[dim])
    name = pool.one_of(["index_add", "index_copy"])
    if name == "index_copy":
        where = positive(pool, a.shape[dim], distinct=True)
    source = f"torch.index_select({{0}}, {dim}, {where})"
    return Code(f"{{0}}.{name}({dim}, {where}, {source} + {source})", (a,))


@operation
def index_fill(pool: Pool) -> Code:
    a = pool.pick(ranked(1))
    dim = pool.dim(a)
    where = tensor(pool, a.shape[dim])
    return Code(f"{{0}}.index_fill({dim}, {where}, {pool.number(a)})", (a,))


@operation
def index_put(pool: Pool) -> Code:
    a = pool.pick(ranked(1))
    text, value = index(pool, a.shape[0], negative=True)
    number = f"torch.tensor({pool.number(a)}, dtype={a.tensor.dtype})"
    return Code(f"torch.index_put({{0}}, ({text},), {number}, accumulate=True)", (a, value))


@operation
def slice_scatter(pool: Pool) -> Code:
    a = pool.pick(ranked(1))
    text = pool.one_of(
        [
            "torch.select_scatter({0}, {0}.select(-1, 0) + {0}.select(-1, 0), -1, 0)",
            "torch.slice_scatter({0}, {0}[1:] + {0}[:1], 0, 1)",
            "torch.diagonal_scatter({0}, {0}.diagonal() + {0}.diagonal())",
        ]
    )
    return Code(text, (a,))


@operation
def bucketize(pool: Pool) -> Code:
    a = pool.pick(pool.exact, numeric, below(1000))
    right = pool.one_of(["", ", right=True"])
    return Code(f"torch.bucketize({{0}}, torch.tensor([-1.0, 0.0, 0.5, 2.0]){right})", (a,))


@operation
def masked_by_where(pool: Pool) -> Code:
    a = pool.pick()
    mask = pool.partner(a, boolean)
    return Code("torch.where({1}, {0}, torch.zeros_like({0}))", (a, mask))


@operation
def isin(pool: Pool) -> Code:
    a = pool.pick(pool.exact, integral)
    return Code("torch.isin({0}, torch.tensor([0, 2, -1]))", (a,))
