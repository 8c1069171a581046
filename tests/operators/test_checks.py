"""What eager refuses at run time raises in compiled code too, and leaves nothing changed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import neuron_compile
from neuron_compile.runtime import Executor

from ..support import IGNORE_TORCH, neuron
from .compare import assert_same, copied

X = torch.arange(12.0).reshape(3, 4) / 12
PLANE = torch.arange(2.0).reshape(1, 1, 1, 2)


def ints(*values: int) -> torch.Tensor:
    """An int64 vector."""
    return torch.tensor(values)


def cells(*values: int) -> torch.Tensor:
    """An int64 matrix of one row."""
    return torch.tensor([values])


#: A function of a tensor and another with values to be checked; the first; good values; bad ones.
Case = tuple[Callable[..., Any], torch.Tensor, list[torch.Tensor], list[torch.Tensor]]

INDICES: dict[str, Case] = {
    "embedding": (lambda x, i: F.embedding(i, x), X, [ints(0, 2)], [ints(0, 3), ints(-1)]),
    "embedding_int32": (
        lambda x, i: F.embedding(i, x),
        X,
        [ints(0, 2).int()],
        [ints(3).int(), ints(-1).int()],
    ),
    "index_select": (
        lambda x, i: x.index_select(-1, i),
        X,
        [ints(0, 3)],
        [ints(4), ints(-1), ints(2**40)],
    ),
    "index_select_rows": (lambda x, i: x.index_select(0, i), X, [ints(2)], [ints(3), ints(-1)]),
    "index_select_last": (lambda x, i: x[None].index_select(2, i), X, [ints(2)], [ints(4)]),
    "index_select_0d": (lambda x, i: x[0, 0].index_select(0, i), X, [ints(0)], [ints(1)]),
    "gather": (lambda x, i: x.gather(1, i), X, [cells(3, 0)], [cells(0, 4), cells(-1)]),
    "take_along_dim": (lambda x, i: x.take_along_dim(i, 1), X, [cells(3), cells(-1)], []),
    "scatter": (lambda x, i: x.scatter(1, i, 1.0), X, [cells(0, 3)], [cells(4), cells(-1)]),
    "scatter_src": (lambda x, i: x.scatter(1, i, x), X, [cells(3)], [cells(4), cells(-1)]),
    "scatter_add": (lambda x, i: x.scatter_add(1, i, x), X, [cells(3, 3)], [cells(4), cells(-1)]),
    "scatter_reduce": (
        lambda x, i: x.scatter_reduce(1, i, x, "amax"),
        X,
        [cells(3)],
        [cells(4), cells(-1)],
    ),
    "index": (lambda x, i: x[i], X, [ints(0, 2), ints(-3, -1)], [ints(3), ints(-4)]),
    "index_middle": (lambda x, i: x[:, i], X, [ints(3, -4)], [ints(4), ints(-5)]),
    "index_two": (lambda x, i: x[ints(1), i], X, [ints(3), ints(-4)], [ints(4), ints(-5)]),
    "index_put": (
        lambda x, i: x.index_put((i,), x[0]),
        X,
        [ints(2), ints(-3)],
        [ints(3), ints(-4)],
    ),
    "index_put_accumulate": (
        lambda x, i: x.index_put((i,), x[0], accumulate=True),
        X,
        [ints(2, 2), ints(-3)],
        [ints(3), ints(-4)],
    ),
    "index_add": (lambda x, i: x.index_add(0, i, x[:1]), X, [ints(2)], [ints(3), ints(-1)]),
    "index_add_1d": (
        lambda x, i: x[0].index_add(0, i, x[0, :1]),
        X,
        [ints(3)],
        [ints(4), ints(-1)],
    ),
    "index_copy": (lambda x, i: x.index_copy(0, i, x[:1]), X, [ints(2)], [ints(3), ints(-1)]),
    "index_copy_0d": (lambda x, i: x[0, 0].index_copy(0, i, x[0, 1]), X, [ints(0)], [ints(1)]),
    "index_fill": (
        lambda x, i: x.index_fill(0, i, 1.5),
        X,
        [ints(0, 2), ints(-3)],
        [ints(3), ints(-4)],
    ),
    "index_fill_tensor": (
        lambda x, i: x.index_fill(1, i, x[0, 3]),
        X,
        [ints(3), ints(-4)],
        [ints(4), ints(-5)],
    ),
    "take": (lambda x, i: x.take(i), X, [ints(11), ints(-12)], [ints(12), ints(-13)]),
    "put": (
        lambda x, i: x.put(i, x[0, 3:]),
        X,
        [ints(11), ints(-12)],
        [ints(12), ints(-13)],
    ),
    "one_hot": (lambda x, i: F.one_hot(i, 3) + x[0, 0], X, [ints(0, 2)], [ints(3), ints(-1)]),
    "nll_loss": (
        F.nll_loss,
        X,
        [ints(0, 3, -100)],
        [ints(0, 4, 1), ints(0, -1, 1)],
    ),
    "cross_entropy": (
        lambda x, i: F.cross_entropy(x, i, reduction="none", ignore_index=2),
        X,
        [ints(0, 3, 2)],
        [ints(0, 4, 1), ints(0, -1, 1)],
    ),
    "nll_loss2d": (
        lambda x, i: F.nll_loss(x.reshape(1, 3, 2, 2), i.reshape(1, 2, 2)),
        X,
        [ints(0, 1, 2, -100)],
        [ints(0, 1, 2, 3), ints(0, 1, 2, -1)],
    ),
    "multi_margin_loss": (
        F.multi_margin_loss,
        X,
        [ints(0, 3, 1)],
        [ints(0, 4, 1)],
    ),
    "max_unpool1d": (
        lambda x, i: F.max_unpool1d(x[0], i[0], 2),
        PLANE,
        [torch.tensor([[[[0, 3]]]])],
        [torch.tensor([[[[0, 4]]]]), torch.tensor([[[[0, -1]]]])],
    ),
    "max_unpool2d": (
        lambda x, i: F.max_unpool2d(x, i, 2),
        PLANE,
        [torch.tensor([[[[0, 7]]]])],
        [torch.tensor([[[[0, 8]]]]), torch.tensor([[[[0, -1]]]])],
    ),
    "max_unpool3d": (
        lambda x, i: F.max_unpool3d(x[None], i[None], 2),
        PLANE,
        [torch.tensor([[[[0, 15]]]])],
        [torch.tensor([[[[0, 16]]]]), torch.tensor([[[[0, -1]]]])],
    ),
    "searchsorted_sorter": (
        lambda x, i: torch.searchsorted(x[0], x[1, :1], sorter=i),
        X,
        [ints(0, 1, 2, 3)],
        [ints(0, 1, 2, 4), ints(-1, 1, 2, 3)],
    ),
}

VALUES: dict[str, Case] = {
    "floor_divide": (lambda x, b: x // b, ints(3, -7), [ints(2, -2)], [ints(1, 0)]),
    "floor_divide_uint8": (
        lambda x, b: x.to(torch.uint8) // b.to(torch.uint8),
        ints(3, 7),
        [ints(2, 2)],
        [ints(1, 0)],
    ),
    "trunc_divide": (
        lambda x, b: torch.div(x, b, rounding_mode="trunc"),
        ints(3, -7),
        [ints(2, -2)],
        [ints(1, 0)],
    ),
    "remainder": (lambda x, b: x % b, ints(3, -7), [ints(2, -2)], [ints(1, 0)]),
    "remainder_scalar": (
        lambda x, b: torch.remainder(3, b) + x,
        ints(3, -7),
        [ints(2, -2)],
        [ints(1, 0)],
    ),
    "fmod": (torch.fmod, ints(3, -7), [ints(2, -2)], [ints(1, 0)]),
    "empty_division": (lambda x, b: x[:0] // b[0], ints(3, -7), [ints(0), ints(1)], []),
    "float_division": (lambda x, b: x // b, X[0], [ints(1, 0, 2, 0)], []),
    "masked_scatter": (
        lambda x, m: x.masked_scatter(m, x[0]),
        X,
        [X > 0.9, X > 0.6],
        [X > 0.5],
    ),
    "binary_cross_entropy": (
        lambda x, p: F.binary_cross_entropy(p, x),
        X,
        [X, X * X],
        [X * 2, X - 0.1, torch.full((3, 4), torch.nan)],
    ),
    "binary_cross_entropy_target": (
        lambda x, t: F.binary_cross_entropy(x, t, weight=x, reduction="sum"),
        X,
        [X],
        [X * 2, X - 0.1],
    ),
    "assertion": (
        lambda x, p: (torch.ops.aten._assert_async.msg(p > 0, "not positive"), x + 1)[1],
        X,
        [torch.tensor(1)],
        [torch.tensor(0)],
    ),
    "cholesky": (
        lambda x, a: torch.linalg.cholesky(a) + x[0, 0],
        X,
        [torch.eye(3)],
        [-torch.eye(3), torch.zeros(2, 3, 3)],
    ),
    "inverse": (
        lambda x, a: torch.linalg.inv(a) + x[0, 0],
        X,
        [torch.eye(3)],
        [torch.zeros(3, 3)],
    ),
}
CASES = {**INDICES, **VALUES}


@pytest.mark.filterwarnings("ignore::neuron_compile.FallbackWarning")
@pytest.mark.parametrize("name", CASES)
def test_as_in_eager(name: str) -> None:
    function, x, good, bad = CASES[name]
    torch._dynamo.reset()
    compiled = neuron(function, fullgraph=True, dynamic=False)
    for value in [*good[:1], *bad, *good]:
        try:
            expected = function(x, value)
        except Exception as error:  # noqa: BLE001 - whatever eager raises is what is wanted
            with pytest.raises(type(error)) as raised:
                compiled(x, value)
            assert type(raised.value) is type(error)
            assert __file__ in str(raised.value) or "aten" in str(raised.value)
        else:
            assert_same(compiled(x, value), expected, f"{name} {value}")


def test_all_bad_values_are_bad_in_eager() -> None:
    for function, x, _, bad in CASES.values():
        for value in bad:
            with pytest.raises(Exception, match=r"."):
                function(x, value)


def test_message_names_operator_shapes_and_line() -> None:
    def select(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return x.index_select(0, index)

    with pytest.raises(IndexError) as raised:
        neuron(select)(X, ints(3))
    message = str(raised.value)
    assert message.startswith(
        "index out of range for dimension 0 with size 3 in "
        "aten.index_select.default(float32[3, 4], int64[1]) (at "
    )
    line = select.__code__.co_firstlineno + 1
    assert message.endswith(f"{__file__}:{line} in select)")


def test_first_failure_of_several() -> None:
    def function(x: torch.Tensor, i: torch.Tensor, j: torch.Tensor, k: torch.Tensor) -> Any:
        y = x[i, j].sum() + x.gather(1, k)
        return y, x.take(k)

    compiled = neuron(function, fullgraph=True)
    good = ints(0), ints(3), cells(3)
    compiled(X, *good)
    before = neuron_compile.report().compilations
    for position, bad, error, text in (
        (0, ints(3), IndexError, "dimension 0 with size 3"),
        (1, ints(-5), IndexError, "dimension 1 with size 4"),
        (2, cells(5), RuntimeError, r"aten.gather.*, int64\[1, 1\]"),
        (2, cells(-4), RuntimeError, "aten.gather"),
    ):
        args = list(good)
        args[position] = bad
        with pytest.raises(error, match=text):
            compiled(X, *args)
        assert_same(compiled(X, *good), function(X, *good), "after a failure")
    with pytest.raises(IndexError, match="dimension 0 with size 3"):
        compiled(X, ints(7), ints(7), cells(7))
    assert neuron_compile.report().compilations == before


def test_mutations_are_not_made() -> None:
    def update(x: torch.Tensor, total: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        total.add_(1)
        x.index_add_(0, index, x[:1])
        return x.sum()

    compiled = neuron(update, fullgraph=True)
    x, total = X.clone(), torch.zeros(2)
    with pytest.raises(RuntimeError, match="index out of range"):
        compiled(x, total, ints(3))
    assert torch.equal(x, X)
    assert torch.equal(total, torch.zeros(2))
    compiled(x, total, ints(2))
    assert torch.equal(x, X.index_add(0, ints(2), X[:1]))
    assert torch.equal(total, torch.ones(2))


class Lookup(nn.Module):
    """An embedding, batch norm's buffers and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, index: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.norm(self.embedding(index))), target)


def test_training_step() -> None:
    model = Lookup()
    compiled = neuron(model, fullgraph=True)
    state = copied(dict(model.state_dict()))
    for index, target in ((ints(0, 5), ints(1, 1)), (ints(0, 1), ints(1, 3))):
        with pytest.raises(IndexError):
            compiled(index, target)
    assert_same(dict(model.state_dict()), state, "state")
    compiled(ints(0, 4), ints(1, 2)).backward()
    assert model.embedding.weight.grad is not None
    assert int(model.norm.num_batches_tracked) == 1


@IGNORE_TORCH
def test_backward_graph() -> None:
    class Gather(torch.autograd.Function):
        """Its gradient divides the index by a divisor that only the backward reads."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(divisor)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            (divisor,) = ctx.saved_tensors
            return grad * (4 // divisor), None

    compiled = neuron(Gather.apply, fullgraph=True)
    x = X.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        compiled(x, torch.tensor(0)).sum().backward()
    assert x.grad is None
    compiled(x, torch.tensor(2)).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((3, 4), 2.0))


@pytest.mark.filterwarnings("ignore::neuron_compile.FallbackWarning")
def test_partitions() -> None:
    def function(x: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        rows = x[i]
        found = torch._standard_gamma(rows + 1) * 0 + rows  # runs in eager
        return found.index_select(1, j)

    compiled = neuron(function, fullgraph=True)
    assert_same(compiled(X, ints(1), ints(2)), X[1:2, 2:3], "good")
    for args in ((ints(3), ints(0)), (ints(0), ints(4))):
        with pytest.raises((IndexError, RuntimeError), match="index out of range"):
            compiled(X, *args)
    assert_same(compiled(X, ints(1), ints(2)), X[1:2, 2:3], "good again")


def test_only_a_check() -> None:
    def function(x: torch.Tensor, flag: torch.Tensor) -> torch.Tensor:
        torch.ops.aten._assert_async.msg(flag, "no")
        return x

    compiled = neuron(function, fullgraph=True)
    assert compiled(X, torch.tensor(True)) is not None
    with pytest.raises(RuntimeError, match=r"^no in aten._assert_async"):
        compiled(X, torch.tensor(False))


def test_dynamic_shapes() -> None:
    compiled = neuron(lambda x, i: x.index_select(0, i) + 1, fullgraph=True, dynamic=True)
    for rows in (3, 5, 8):
        x = torch.randn(rows, 2)
        assert_same(compiled(x, ints(rows - 1)), x[rows - 1 :] + 1, "last")
        with pytest.raises(IndexError, match=f"with size {rows} "):
            compiled(x, ints(rows))


def test_assertion_of_a_dynamic_graph() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        torch.ops.aten._assert_async.msg((x > 0).all(), "no")
        return x + 1

    compiled = neuron(function, fullgraph=True, dynamic=True)
    compiled(torch.ones(3, 2))
    with pytest.raises(RuntimeError, match=r"^no in"):
        compiled(torch.zeros(4, 2))


def test_two_signatures_of_one_lowering() -> None:
    """One trace serves both calls; each has a message of its own."""

    def function(x: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        first = x.index_select(0, i)
        return first + x.index_select(0, j)

    compiled = neuron(function, fullgraph=True)
    line = function.__code__.co_firstlineno
    with pytest.raises(IndexError, match=f":{line + 1} in"):
        compiled(X, ints(3), ints(0))
    with pytest.raises(IndexError, match=f":{line + 2} in"):
        compiled(X, ints(0), ints(3))


def test_only_programs_with_checks_have_a_code(executors: list[Executor]) -> None:
    neuron(lambda x: x * 2 + 1)(X)
    neuron(lambda x, i: x.index_select(0, i))(X, ints(1))
    neuron(lambda x, i: x.index_select(0, i), options=UNCHECKED)(X, ints(1))
    # The indices of these are known: a divisor that is a number, what decompositions make.
    neuron(lambda x: (x // 3, F.interpolate(x[None, None].float(), scale_factor=2)))(
        ints(1, 2, 3)[None]
    )
    checks = [len(executor.signature.checks) for executor in executors]
    assert checks == [0, 1, 0, 0]


def test_failures_in_threads() -> None:
    compiled = neuron(lambda x, i: x.index_select(0, i))
    compiled(X, ints(0))

    def call(row: int) -> str:
        try:
            return str(torch.equal(compiled(X, ints(row)), X[row : row + 1]))
        except IndexError:
            return "IndexError"

    rows = [0, 3, 1, 5, 2, -1] * 20
    with ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(call, rows))
    assert outcomes == ["True" if 0 <= row < 3 else "IndexError" for row in rows]


UNCHECKED = {"check_indices": False}


def test_without_checks_gathers_clamp_and_scatters_drop() -> None:
    def function(x: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> Any:
        return F.embedding(i, x), x.gather(1, j), x.index_add(0, i, x[:1]), ints(4) // j

    results = neuron(function, fullgraph=True, options=UNCHECKED)(X, ints(9), cells(0))
    assert torch.equal(results[0], X[2:])
    assert torch.equal(results[1], X[:1, :1])
    assert torch.equal(results[2], X)
    assert results[3].shape == (1, 1)


def test_assertions_stay_without_checks() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        torch.ops.aten._assert_async.msg((x > 0).all(), "no")
        return x + 1

    with pytest.raises(RuntimeError, match=r"^no in"):
        neuron(function, options=UNCHECKED)(torch.zeros(2))


def test_both_settings_in_one_process() -> None:
    def function(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return x.index_select(0, i)

    for _ in range(2):
        torch._dynamo.reset()
        assert torch.equal(neuron(function, options=UNCHECKED)(X, ints(9)), X[2:])
        torch._dynamo.reset()
        with pytest.raises(IndexError):
            neuron(function)(X, ints(9))


RANDOM: dict[str, tuple[Callable[..., Any], list[Any], list[Any]]] = {
    "bernoulli": (torch.bernoulli, [X], [X + 1, X - 1, torch.full((2,), torch.nan)]),
    "bernoulli_p": (lambda x: torch.bernoulli(x, p=1.5), [], [X]),
    "uniform": (lambda x: x.clone().uniform_(2, 1), [], [X]),
}


@pytest.mark.filterwarnings("ignore::neuron_compile.FallbackWarning")
@pytest.mark.parametrize("name", RANDOM)
def test_random_operators(name: str) -> None:
    function, good, bad = RANDOM[name]
    compiled = neuron(function, fullgraph=True, dynamic=False)
    for value in good:
        compiled(value)
    for value in bad:
        with pytest.raises(RuntimeError):
            function(value)
        with pytest.raises(RuntimeError):
            compiled(value)
