"""In-place operations: on results, on views of results, on inputs and their views."""

from __future__ import annotations

from ..generate import Code, Pool, Unavailable, Value
from .indexing import index, positive
from .table import below, boolean, finite, floating, numeric, operation, ranked, same_dtype
from .views import slices


@operation
def write_arithmetic(pool: Pool) -> Code:
    a = pool.target(below(50), numeric)
    b = pool.source(a, below(50))
    text = pool.one_of(["{0}.add_({1})", "{0}.mul_({1})", "{0}.sub_({1})"])
    return Code(text, (a, b), writes=0)


@operation
def write_a_number(pool: Pool) -> Code:
    a = pool.target(below(50))
    name = pool.one_of(["add_", "mul_", "fill_"])
    return Code(f"{{0}}.{name}({pool.number(a)})", (a,), writes=0)


@operation
def augmented(pool: Pool) -> Code:
    a = pool.target(below(50), numeric)
    sign = pool.one_of(["+=", "*=", "-="])
    return Code(f"{{0}} {sign} {pool.number(a)}", (a,), statement=True, writes=0)


@operation
def copy_(pool: Pool) -> Code:
    a = pool.target()
    b = pool.source(a, pool.exact, finite) if not a.floating else pool.source(a)
    return Code("{0}.copy_({1})", (a, b), writes=0)


@operation
def zero_(pool: Pool) -> Code:
    a = pool.target()
    return Code("{0}.zero_()", (a,), writes=0)


@operation
def pointwise_(pool: Pool) -> Code:
    a = pool.target(floating, below(6))
    name = pool.one_of(["tanh_", "sigmoid_", "exp_", "sin_"])
    return Code(f"{{0}}.{name}()", (a,), exact=False, writes=0)


@operation
def kinked_(pool: Pool) -> Code:
    a = pool.target(pool.smooth, numeric)
    texts = ["relu_()", "neg_()", "abs_()", "clamp_(min=0)", "clamp_(max=1)", "square_()"]
    return Code(f"{{0}}.{pool.one_of(texts)}", (a,), writes=0)


@operation
def cumsum_(pool: Pool) -> Code:
    a = pool.target(numeric, ranked(1))
    return Code(f"{{0}}.cumsum_({pool.dim(a)})", (a,), writes=0)


@operation
def triangle_(pool: Pool) -> Code:
    a = pool.target(ranked(2))
    return Code(f"{{0}}.{pool.one_of(['tril_', 'triu_'])}({pool.integer(-1, 1)})", (a,), writes=0)


@operation
def masked_fill_(pool: Pool) -> Code:
    a = pool.target()
    mask = pool.source(a, boolean)
    return Code(f"{{0}}.masked_fill_({{1}}, {pool.number(a)})", (a, mask), writes=0)


@operation
def write_where(pool: Pool) -> Code:
    a = pool.target(ranked(1))
    mask = pool.source(a, boolean, lambda v: v.shape == a.shape)
    return Code(f"{{0}}[{{1}}] = {pool.number(a)}", (a, mask), statement=True, writes=0)


@operation
def assign_number(pool: Pool) -> Code:
    a = pool.target()
    text = f"{{0}}[{slices(pool, a)}] = {pool.number(a)}"
    return Code(text, (a,), statement=True, writes=0)


@operation
def assign(pool: Pool) -> Code:
    a = pool.target()
    where = slices(pool, a)
    try:
        part = Value("", eval(f"tensor[{where}]", {"tensor": a.tensor}))
    except (IndexError, RuntimeError, ValueError) as error:
        raise Unavailable from error
    b = pool.source(part, same_dtype(a), lambda v: _other_memory(v, a))
    return Code(f"{{0}}[{where}] = {{1}}", (a, b), statement=True, writes=0)


def _other_memory(a: Value, b: Value) -> bool:
    return bool(a.tensor.untyped_storage()._cdata != b.tensor.untyped_storage()._cdata)


@operation
def augment_a_part(pool: Pool) -> Code:
    a = pool.target(below(50), numeric)
    sign = pool.one_of(["+=", "*="])
    text = f"{{0}}[{slices(pool, a)}] {sign} {pool.number(a)}"
    return Code(text, (a,), statement=True, writes=0)


@operation
def assign_at_indices(pool: Pool) -> Code:
    a = pool.target(ranked(1))
    text, value = index(pool, a.shape[0], lambda v: _other_memory(v, a), negative=True)
    return Code(f"{{0}}[{text}] = {pool.number(a)}", (a, value), statement=True, writes=0)


@operation
def index_put_(pool: Pool) -> Code:
    a = pool.target(ranked(1))
    text, value = index(pool, a.shape[0], lambda v: _other_memory(v, a), negative=True)
    number = f"torch.tensor({pool.number(a)}, dtype={a.tensor.dtype})"
    text = f"{{0}}.index_put_(({text},), {number}, accumulate=True)"
    return Code(text, (a, value), writes=0)


@operation
def index_add_(pool: Pool) -> Code:
    a = pool.target(ranked(1))
    dim = pool.dim(a)
    where = positive(pool, a.shape[dim])
    text = f"{{0}}.index_add_({dim}, {where}, torch.index_select({{0}}, {dim}, {where}))"
    return Code(text, (a,), writes=0)


@operation
def index_fill_(pool: Pool) -> Code:
    a = pool.target(ranked(1))
    dim = pool.dim(a)
    where = positive(pool, a.shape[dim])
    return Code(f"{{0}}.index_fill_({dim}, {where}, {pool.number(a)})", (a,), writes=0)


@operation
def scatter_(pool: Pool) -> Code:
    a = pool.target(ranked(1))
    text, value = index(
        pool,
        a.shape[-1],
        lambda v: v.dim == a.dim and all(m <= n for m, n in zip(v.shape, a.shape, strict=True)),
        lambda v: _other_memory(v, a),
    )
    return Code(f"{{0}}.scatter_(-1, {text}, {pool.number(a)})", (a, value), writes=0)


@operation
def fill_diagonal_(pool: Pool) -> Code:
    a = pool.target(ranked(2, 2))
    return Code(f"{{0}}.fill_diagonal_({pool.number(a)})", (a,), writes=0)


@operation
def write_through_a_view(pool: Pool) -> Code:
    a = pool.target(ranked(2), below(50))
    b = pool.number(a)
    texts = [
        f"{{0}}.mT.mul_({b})",
        f"{{0}}.transpose(0, -1)[0].fill_({b})",
        f"{{0}}.diagonal().add_({b})",
        f"{{0}}[..., 1:].add_({b})",
        f"{{0}}.unsqueeze(0)[:, :1].fill_({b})",
        f"{{0}}.view(-1)[::2].fill_({b})",
        f"torch.chunk({{0}}, 2, -1)[0].mul_({b})",
        f"{{0}}.mT[:1] = {b}",
    ]
    text = pool.one_of(texts)
    return Code(text, (a,), statement=True, writes=0)


@operation
def addcmul_(pool: Pool) -> Code:
    a = pool.target(floating, below(50))
    b = pool.source(a, same_dtype(a), below(10))
    return Code("{0}.addcmul_({1}, {1}, value=0.5)", (a, b), writes=0)


@operation
def lerp_(pool: Pool) -> Code:
    a = pool.target(floating)
    return Code("{0}.lerp_({1}, 0.5)", (a, pool.source(a, same_dtype(a))), writes=0)


@operation
def metadata(pool: Pool) -> Code:
    """Other sizes and strides for the same tensor object, which Dynamo takes for no input."""
    inputs = [value.tensor for value in pool.values if value.name.startswith("x")]
    a = pool.target(ranked(1), lambda v: all(v.tensor is not x for x in inputs))
    texts = ["{0}.unsqueeze_(0)", "{0}.squeeze_()", "{0}.transpose_(0, -1)"]
    if a.dim == 2:
        texts += ["{0}.t_()"]
    return Code(pool.one_of(texts), (a,), writes=0)
