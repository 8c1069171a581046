"""Products and the layers of networks."""

from __future__ import annotations

from collections.abc import Sequence

from ..generate import Code, Pool, Unavailable, Value
from .table import below, finite, floating, full, integral, numeric, operation, ranked, same_dtype


@operation
def matmul(pool: Pool) -> Code:
    a = pool.pick(ranked(1), numeric, below(50))
    pairs = [
        (b, text)
        for b in pool.values
        if b.dim and same_dtype(a)(b) and below(50)(b)
        for text, size in (
            ("{0} @ {1}", b.shape[-2 if b.dim > 1 else 0]),
            ("{0} @ {1}.mT", b.shape[-1]),
        )
        if size == a.shape[-1] and (b.dim > 1 or text == "{0} @ {1}")
    ]
    if not pairs:
        raise Unavailable
    b, text = pool.one_of(pairs)
    return Code(text, (a, b))


@operation
def gram(pool: Pool) -> Code:
    a = pool.pick(ranked(2), numeric, below(30))
    return Code(pool.one_of(["{0} @ {0}.mT", "{0}.mT @ {0}", "torch.matmul({0}.mT, {0})"]), (a,))


@operation
def linear(pool: Pool) -> Code:
    a = pool.pick(ranked(1), floating, below(50))
    weights = same_dtype(a), lambda other: other.dim == 2 and other.shape[1] == a.shape[-1]
    return Code("F.linear({0}, {1})", (a, pool.pick(*weights, below(50))))


@operation
def einsum(pool: Pool) -> Code:
    a = pool.pick(ranked(2, 2), numeric, below(50))
    b = pool.pick(ranked(2, 2), same_dtype(a), below(50))
    fits = [
        pattern
        for pattern, same in (
            ("ij,jk->ik", a.shape[1] == b.shape[0]),
            ("ij,kj->ki", a.shape[1] == b.shape[1]),
            ("ij,ik->jk", a.shape[0] == b.shape[0]),
            ("ij,ij->i", a.shape == b.shape),
            ("ij,kl->ikl", len(b.shape) == 2),
        )
        if same
    ]
    return Code(f"torch.einsum('{pool.one_of(fits)}', {{0}}, {{1}})", (a, b))


@operation
def outer(pool: Pool) -> Code:
    a = pool.pick(ranked(1, 1), numeric, below(50))
    return Code("torch.outer({0}, {1})", (a, pool.pick(ranked(1, 1), numeric, below(50))))


@operation
def addmm(pool: Pool) -> Code:
    a = pool.pick(ranked(2, 2), floating, below(50))
    text = pool.one_of(
        [
            "torch.addmm({1}, {0}, {0}.t(), beta=0.5, alpha=2)",
            "torch.baddbmm({1}, {0}[None], {0}.t()[None])",
            "torch.addmv({1}[..., 0], {0}, {0}[0])",
        ]
    )
    return Code(text, (a, pool.pick(same_dtype(a), ranked(0, 2))))


def _sizes(value: Value, count: int) -> Sequence[int]:
    return value.shape[value.dim - count :]


@operation
def layer_norm(pool: Pool) -> Code:
    a = pool.pick(floating, ranked(1), full, below(50), lambda value: value.shape[-1] > 1)
    name = pool.one_of(["F.layer_norm({0}, %s)", "F.rms_norm({0}, %s, eps=0.1)"])
    return Code(name % list(_sizes(a, pool.integer(1, a.dim))), (a,), exact=False)


@operation
def other_norms(pool: Pool) -> Code:
    a = pool.pick(floating, ranked(2, 4), full, below(50))
    text = pool.one_of(
        [
            "F.batch_norm({0}, None, None, training=True, eps=0.1)",
            "F.group_norm({0}, 1, eps=0.1)",
            "F.instance_norm({0}, eps=0.1)",
            "F.normalize({0} + 3, dim=-1)",
        ]
    )
    return Code(text, (a,), exact=False)


@operation
def pooling(pool: Pool) -> Code:
    a = pool.pick(floating, ranked(3, 4), full, pool.smooth)
    rank = pool.integer(1, 2)
    text = pool.one_of(
        [
            f"F.avg_pool{rank}d({{0}}, 2, stride=1)",
            f"F.max_pool{rank}d({{0}}, 2)",
            f"F.adaptive_avg_pool{rank}d({{0}}, 2)",
            f"F.max_pool{rank}d({{0}}, 3, stride=1, padding=1)",
        ]
    )
    return Code(text, (a,), exact="max" in text)


@operation
def convolution(pool: Pool) -> Code:
    a = pool.pick(floating, ranked(2, 2), full, below(30))
    # Padding times a weight that is not finite is NaN in eager alone (docs/decisions.md).
    b = pool.pick(same_dtype(a), ranked(2, 2), full, finite, below(30))
    text = pool.one_of(
        [
            "F.conv2d({0}[None, None], {1}[None, None], padding=2)",
            f"F.conv1d({{0}}[:, None], {{1}}[:, None], padding={b.shape[1]})",
            "F.conv_transpose2d({0}[None, None], {1}[None, None], stride=2)",
        ]
    )
    return Code(text, (a, b), exact=False)


@operation
def attention(pool: Pool) -> Code:
    a = pool.pick(floating, ranked(2, 4), full, below(10))
    causal = pool.one_of(["", ", is_causal=True"])
    return Code(f"F.scaled_dot_product_attention({{0}}, {{0}}, {{0}}{causal})", (a,), exact=False)


@operation
def losses(pool: Pool) -> Code:
    a = pool.pick(floating, full, below(10))
    b = pool.partner(a, lambda other: other.shape == a.shape, same_dtype(a))
    text = pool.one_of(
        [
            "F.mse_loss({0}, {1})",
            "F.binary_cross_entropy_with_logits({0}, {1}.sigmoid())",
            "F.huber_loss({0}, {1}, reduction='none')",
            "F.cosine_similarity({0} + 20, {1} + 20, dim=-1)",
        ]
    )
    return Code(text, (a, b), exact=False)


@operation
def cross_entropy(pool: Pool) -> Code:
    a = pool.pick(floating, ranked(2, 2), full)
    b = pool.pick(pool.exact, integral, lambda other: other.shape == a.shape[:1])
    return Code(f"F.cross_entropy({{0}}, {{1}}.long() % {a.shape[1]})", (a, b), exact=False)
