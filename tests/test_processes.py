"""Other processes beside one that has compiled: forked, spawned, and those of a DataLoader."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from .support import equal, equal_modules, in_fresh_interpreter, neuron

FORKED = """
import os, sys, warnings
import torch
import neuron_compile

# Python 3.12 warns of every fork of a process with threads.
warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
# ATen's threads do not survive a fork either: both have some before it.
torch.set_num_threads(2)
torch.randn(1000, 1000).exp()
x = torch.randn(400, 400)
model = torch.nn.Sequential(torch.nn.Linear(400, 300), torch.nn.Dropout(0.5), torch.nn.ReLU())
compiled = torch.compile(model, backend="neuron")
compiled(x).sum().backward()
model.zero_grad()

def branch(x):
    return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x.abs(),))

dynamic = torch.compile(branch, backend="neuron", dynamic=True)
dynamic(x)
strict = torch.compile(lambda x: x + 1, backend="neuron", options={"fullgraph_on_device": True})
strict(x)

child = os.fork()
if child == 0:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            torch.manual_seed(step)
            dropped = compiled(x)
            dropped.sum().backward()
            kept = dropped.detach().ne(0).sum(0, dtype=torch.float32) * 2
            assert torch.allclose(model[0].bias.grad, kept), "one mask for both"
            model.zero_grad()
            assert torch.equal(dynamic(x[step:]), branch(x[step:])), "a new size"
        assert torch.equal(torch.compile(lambda x: x * 3, backend="neuron")(x), x * 3), "new code"
        for _ in range(2):
            try:
                strict(x)
            except Exception as error:
                assert "spawn" in str(error), error
            else:
                raise AssertionError("strict mode let it run in eager")
    said = [w for w in caught if issubclass(w.category, neuron_compile.FallbackWarning)]
    assert len(said) == 1 and "forked" in str(said[0].message), said
    assert "every operator" in neuron_compile.report().fallback_reasons
    with torch.compiler.set_stance("force_eager"):
        assert torch.equal(dynamic(x), branch(x))
    print("child is done", flush=True)
    sys.exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert torch.allclose(dynamic(x), branch(x)) and not neuron_compile.report().fallback_reasons
print("parent is done")
"""

# Of Python from 3.12 on, about every fork of a process with threads.
FORK_OF_THREADS = "ignore:.*multi-threaded, use of fork:DeprecationWarning"
# Of JAX's, where another test has used it in this process.
FORK_OF_JAX = "ignore:.*os.fork.. was called:RuntimeWarning"


def test_a_forked_process_runs_in_eager() -> None:
    finished = in_fresh_interpreter(FORKED)
    assert finished.stdout.split("\n")[:2] == ["child is done", "parent is done"], finished.stderr


def work(rank: int, connection: object) -> None:
    """What a spawned process does: it compiles for itself."""
    x = torch.arange(6.0) + rank
    compiled = torch.compile(lambda x: (x.sin() * 2).sum(), backend="neuron")
    connection.send([float(compiled(x)) for _ in range(3)])  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_spawned_process_compiles_for_itself() -> None:
    neuron(lambda x: x + 1)(torch.ones(2))
    context = torch.multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(1, theirs))
    process.start()
    theirs.close()
    results = ours.recv()
    process.join()
    assert process.exitcode == 0
    equal(torch.tensor(results), ((torch.arange(6.0) + 1).sin() * 2).sum().repeat(3))


@pytest.mark.filterwarnings(FORK_OF_JAX, FORK_OF_THREADS)
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_that_load_data(method: str) -> None:
    eager = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    model = copy.deepcopy(eager)
    compiled = neuron(model)
    compiled(torch.randn(3, 4)).sum().backward()
    data = TensorDataset(torch.randn(18, 4), torch.randn(18, 2))
    loader = DataLoader(data, batch_size=6, num_workers=2, multiprocessing_context=method)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (eager, model)]
    for _ in range(2):
        for x, target in loader:
            losses = []
            for module, optimizer in zip((eager, compiled), optimizers, strict=True):
                optimizer.zero_grad()
                loss = F.mse_loss(module(x), target)
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            equal(losses[1], losses[0])
    equal_modules(model, eager)


class Normalized(torch.utils.data.Dataset[torch.Tensor]):
    """A data set whose items pass through compiled code, in whatever process loads them."""

    def __init__(self) -> None:
        self.function = neuron(lambda x: (x - x.mean()) / x.std())

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.function(torch.arange(5.0) * (index + 1) + 0.5 * torch.arange(5.0) ** 2)


@pytest.mark.filterwarnings(FORK_OF_JAX, FORK_OF_THREADS)
@pytest.mark.filterwarnings("ignore::neuron_compile.FallbackWarning")
def test_workers_that_run_compiled_code() -> None:
    data = Normalized()
    wanted = [data[index] for index in range(4)]
    for _ in range(2):
        for index, item in enumerate(
            DataLoader(data, num_workers=2, multiprocessing_context="fork")
        ):
            equal(item[0], wanted[index])
