"""Reductions, scans and sorts."""

from __future__ import annotations

from ..generate import Code, Pool, Unavailable, Value
from .table import below, floating, full, numeric, operation, ranked


def dims(pool: Pool, value: Value) -> str:
    """``dim=`` of a reduction: none, one or more, perhaps kept."""
    if not value.dim:
        return ""
    which = pool.one_of(["one", "none", "some"])
    if which == "none":
        return ""
    keep = pool.one_of(["", "", ", keepdim=True"])
    if which == "one":
        return f", dim={pool.dim(value)}{keep}"
    count = pool.integer(1, value.dim)
    first = pool.integer(0, value.dim - 1)
    chosen = [(first + step) % value.dim for step in range(count)]
    return f", dim={tuple(chosen)}{keep}"


def one_dim(pool: Pool, value: Value) -> str:
    """``dim=`` for one dimension, perhaps kept."""
    return f"dim={pool.dim(value)}{pool.one_of(['', '', ', keepdim=True'])}"


@operation
def sums(pool: Pool) -> Code:
    a = pool.pick()
    dtype = pool.one_of(["", "", "", ", dtype=torch.float64"])
    return Code(f"torch.sum({{0}}{dims(pool, a)}{dtype})", (a,))


@operation
def mean(pool: Pool) -> Code:
    a = pool.pick(floating)
    return Code(f"torch.mean({{0}}{dims(pool, a)})", (a,), exact=False)


@operation
def var(pool: Pool) -> Code:
    a = pool.pick(floating, below(50))
    return Code(f"torch.var({{0}}{dims(pool, a)}, correction=0)", (a,), exact=False)


@operation
def amax(pool: Pool) -> Code:
    a = pool.pick(pool.smooth)
    return Code(f"torch.{pool.one_of(['amax', 'amin'])}({{0}}{dims(pool, a)})", (a,))


@operation
def argmax(pool: Pool) -> Code:
    a = pool.pick(pool.exact, numeric)
    name = pool.one_of(["argmax", "argmin"])
    if a.dim and pool.chance():
        return Code(f"torch.{name}({{0}}, {one_dim(pool, a)})", (a,))
    return Code(f"torch.{name}({{0}})", (a,))


@operation
def max_along(pool: Pool) -> Code:
    a = pool.pick(pool.smooth, ranked(1))
    which = pool.one_of(["values", "indices"] if pool.exact(a) else ["values"])
    return Code(f"torch.{pool.one_of(['max', 'min'])}({{0}}, {one_dim(pool, a)}).{which}", (a,))


@operation
def cumulative(pool: Pool) -> Code:
    a = pool.pick()
    name = pool.one_of(["cumsum", "cumsum", "cumprod", "logcumsumexp"])
    if name == "logcumsumexp" and not a.floating:
        raise Unavailable
    return Code(f"torch.{name}({{0}}, {pool.dim(a)})", (a,), exact=name != "logcumsumexp")


@operation
def cumulative_extremum(pool: Pool) -> Code:
    a = pool.pick(pool.smooth, numeric)
    return Code(f"torch.{pool.one_of(['cummax', 'cummin'])}({{0}}, {pool.dim(a)}).values", (a,))


@operation
def truth(pool: Pool) -> Code:
    a = pool.pick(pool.exact)
    return Code(f"torch.{pool.one_of(['any', 'all'])}({{0}}{dims(pool, a)})", (a,))


@operation
def count_nonzero(pool: Pool) -> Code:
    a = pool.pick(pool.exact, ranked(1))
    return Code(f"torch.count_nonzero({{0}}, {pool.dim(a)})", (a,))


@operation
def logsumexp(pool: Pool) -> Code:
    a = pool.pick(floating, ranked(1))
    return Code(f"torch.logsumexp({{0}}, {one_dim(pool, a)})", (a,), exact=False)


@operation
def softmax(pool: Pool) -> Code:
    a = pool.pick(floating, ranked(1))
    name = pool.one_of(["softmax", "log_softmax"])
    return Code(f"torch.{name}({{0}}, {pool.dim(a)})", (a,), exact=False)


@operation
def prod(pool: Pool) -> Code:
    a = pool.pick(ranked(1), below(5))
    return Code(f"torch.prod({{0}}, {one_dim(pool, a)})", (a,))


@operation
def norm(pool: Pool) -> Code:
    a = pool.pick(floating, lambda value: pool.mode != "grad", below(100))
    order = pool.one_of(["2", "1", "float('inf')"])
    return Code(f"torch.linalg.vector_norm({{0}}, {order}{dims(pool, a)})", (a,), exact=False)


@operation
def sort(pool: Pool) -> Code:
    a = pool.pick(pool.smooth, ranked(1))
    which = pool.one_of(["values", "indices"] if pool.exact(a) else ["values"])
    down = pool.one_of(["", ", descending=True"])
    return Code(f"torch.sort({{0}}, dim={pool.dim(a)}, stable=True{down}).{which}", (a,))


@operation
def argsort(pool: Pool) -> Code:
    a = pool.pick(pool.exact, ranked(1))
    return Code(f"torch.argsort({{0}}, dim={pool.dim(a)}, stable=True)", (a,))


@operation
def topk(pool: Pool) -> Code:
    # Which of equal elements are taken, and their gradients, are ATen's own affair.
    a = pool.pick(ranked(1), full, numeric, lambda value: not value.tensor.requires_grad)
    dim = pool.dim(a)
    largest = pool.one_of(["True", "False"])
    return Code(
        f"torch.topk({{0}}, {pool.integer(1, a.shape[dim])}, {dim}, {largest}).values", (a,)
    )


@operation
def median(pool: Pool) -> Code:
    a = pool.pick(ranked(1), full, numeric, lambda value: not value.tensor.requires_grad)
    return Code(f"torch.median({{0}}, {one_dim(pool, a)}).values", (a,))
