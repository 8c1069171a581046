"""What holds parameters and data: compiled modules saved, loaded, copied; callables; structures."""

from __future__ import annotations

import collections
import copy
import functools
import gc
import io
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.testing._internal.two_tensor import TwoTensor
from transformers.modeling_outputs import BaseModelOutput

import neuron_compile

from .support import IGNORE_TORCH, cases, check, equal, equal_modules, neuron

CLOSE = {"rtol": 1e-4, "atol": 1e-4}


class Model(nn.Module):
    """A module with parameters and buffers (Dynamo skips classes of torch's own)."""

    scale = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).tanh())

    def scaled(self, x: Tensor) -> Tensor:
        """A bound method."""
        return self.first(x) * self.scale

    @classmethod
    def of_the_class(cls, x: Tensor) -> Tensor:
        """A class method."""
        return x * cls.scale

    @staticmethod
    def of_nothing(x: Tensor) -> Tensor:
        """A static method."""
        return x - 1

    @torch.compile(backend="neuron")
    def decorated(self, x: Tensor) -> Tensor:
        """A method that is compiled where it is defined."""
        return self.first(x).sin()


def wrapped(model: nn.Module) -> Any:
    """An ``OptimizedModule`` around ``model``."""
    return neuron(model)


def in_place(model: nn.Module) -> Any:
    """``model`` itself, compiled by ``module.compile()``."""
    model.compile(backend="neuron")
    return model


HOW = pytest.mark.parametrize("how", [wrapped, in_place])


def pair(how: Callable[[nn.Module], Any]) -> tuple[Any, nn.Module]:
    """A compiled model and an eager one, equal."""
    eager = Model()
    return how(copy.deepcopy(eager)), eager


def train(compiled: Any, eager: nn.Module, steps: int = 3, dtype: Any = torch.float32) -> None:
    """Train both on equal data; results, state and gradients are compared."""
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (compiled, eager)]
    for _ in range(steps):
        x = torch.randn(5, 4, dtype=dtype)
        results = [each(x) for each in (compiled, eager)]
        equal(*results, **CLOSE)
        for optimizer, result in zip(optimizers, results, strict=True):
            optimizer.zero_grad()
            result.square().mean().backward()
            optimizer.step()
    equal_modules(getattr(compiled, "_orig_mod", compiled), eager, **CLOSE)


# ----------------------------------------------------------------------- modules and their state


@HOW
def test_saving_and_loading_the_state(how: Callable[[nn.Module], Any]) -> None:
    compiled, eager = pair(how)
    train(compiled, eager)
    prefix = "_orig_mod." if how is wrapped else ""
    file = io.BytesIO()
    torch.save(compiled.state_dict(), file)
    file.seek(0)
    saved = torch.load(file)
    assert set(saved) == {prefix + name for name in eager.state_dict()}
    fresh = Model().state_dict()
    for assign in (False, True):
        for state in ({prefix + name: value for name, value in fresh.items()}, saved):
            compiled.load_state_dict(copy.deepcopy(state), assign=assign)
            plain = {name.removeprefix(prefix): value for name, value in state.items()}
            eager.load_state_dict(copy.deepcopy(plain), assign=assign)
            train(compiled, eager)
    assert neuron_compile.report().compilations == 2


@HOW
def test_saving_a_compiled_module_itself(how: Callable[[nn.Module], Any]) -> None:
    compiled, eager = pair(how)
    train(compiled, eager)
    file = io.BytesIO()
    torch.save(compiled, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    train(again, copy.deepcopy(eager))
    train(compiled, eager)


@HOW
def test_copies_are_trained_apart(how: Callable[[nn.Module], Any]) -> None:
    compiled, eager = pair(how)
    train(compiled, eager)
    twin, eager_twin = copy.deepcopy(compiled), copy.deepcopy(eager)
    for _ in range(3):
        train(twin, eager_twin, 1)
        train(compiled, eager, 1)
    mine, theirs = next(compiled.parameters()), next(twin.parameters())
    assert not torch.equal(mine, theirs)


def test_replaced_data_and_swapped_parameters() -> None:
    compiled, eager = pair(wrapped)
    model = compiled._orig_mod
    train(compiled, eager)
    for turn in range(3):
        weight = torch.randn(6, 4)
        for each in (model, eager):
            each.first.weight.data = weight.clone()
            each.last.weight = nn.Parameter(torch.full((2, 6), float(turn)))
            each.last.bias.data.mul_(2)
        train(compiled, eager, 1)
    others = [Model() for _ in range(2)]
    others[1].load_state_dict(others[0].state_dict())
    for each, other in zip((model, eager), others, strict=True):
        each.first, other.first = other.first, each.first
        # Refused if anyone holds the parameter itself.
        torch.utils.swap_tensors(each.last.weight, other.last.weight)
    train(compiled, eager)


def test_a_replaced_parameter_is_freed() -> None:
    model = Model()
    compiled = neuron(model)
    compiled(torch.randn(5, 4)).sum().backward()
    weight = weakref.ref(model.first.weight)
    model.first.weight = nn.Parameter(torch.randn(6, 4))
    gc.collect()
    assert weight() is None


@pytest.mark.slow
def test_other_dtypes_while_training() -> None:
    compiled, eager = pair(wrapped)
    for dtype in (torch.float32, torch.float64, torch.float32):
        compiled.to(dtype)
        eager.to(dtype)
        train(compiled, eager, 2, dtype)


def test_parameters_that_are_frozen_in_turn() -> None:
    compiled, eager = pair(wrapped)
    for frozen in ("first", "norm", "first"):
        for each in (compiled, eager):
            each.requires_grad_(True)
            each.zero_grad()
            for name, parameter in each.named_parameters():
                parameter.requires_grad_(frozen not in name)
        train(compiled, eager, 1)


@IGNORE_TORCH
@pytest.mark.parametrize(
    "name",
    cases(["weight_norm", "spectral_norm", "prune", "vector"], {"weight_norm", "spectral_norm"}),
)
def test_parametrizations(name: str) -> None:
    modules = []
    for _ in range(2):
        torch.manual_seed(1)
        module = Model()
        if name == "prune":
            prune.l1_unstructured(module.first, "weight", 0.3)
        elif name != "vector":
            getattr(parametrizations, name)(module.first)
        modules.append(module)
    model, eager = modules
    compiled = neuron(model)
    for _ in range(3):
        train(compiled, eager, 1)
        if name == "vector":
            for each in modules:
                vector = nn.utils.parameters_to_vector(each.parameters())
                nn.utils.vector_to_parameters(vector * 1.5, each.parameters())


# -------------------------------------------------------------------------------------- callables


class Callable_:
    """An object that is called."""

    def __call__(self, x: Tensor) -> Tensor:
        return x.cos()


class Derived(Model):
    """A subclass that calls its parent."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


CALLABLES: dict[str, Callable[[], Any]] = {
    "bound_method": lambda: Model().scaled,
    "class_method": lambda: Model.of_the_class,
    "class_method_of_an_instance": lambda: Model().of_the_class,
    "static_method": lambda: Model.of_nothing,
    "forward_itself": lambda: Model().eval().forward,
    "partial": lambda: functools.partial(torch.add, alpha=2, other=torch.ones(4)),
    "partial_of_a_method": lambda: functools.partial(Model().scaled),
    "object": Callable_,
    "function_of_torch": lambda: torch.sin,
    "functional": lambda: nn.functional.relu,
    "module_of_torch": lambda: nn.Linear(4, 2),
    "derived_module": Derived,
}


@pytest.mark.parametrize(
    "name",
    cases(
        CALLABLES,
        {"class_method_of_an_instance", "forward_itself", "functional", "module_of_torch"},
    ),
)
def test_callables(name: str) -> None:
    check(CALLABLES[name](), torch.randn(3, 4, requires_grad=True), backward=True, **CLOSE)


def test_a_method_compiled_in_its_class() -> None:
    models = [Model(), Model()]
    for model in models * 2:
        x = torch.randn(3, 4)
        equal(model.decorated(x), model.first(x).sin())


# ------------------------------------------------------------------------------------- structures


class Named(collections.namedtuple("Named", "a b")):
    """A named tuple with a method."""

    @property
    def total(self) -> Tensor:
        """Both together."""
        return self.a + self.b


def test_structures_in_and_out() -> None:
    x, y = torch.randn(3), torch.randn(3)
    check(lambda pair: (Named(pair.a * 2, pair.total), pair.a.shape), Named(x, y))
    check(
        lambda data: {key: value * 2 for key, value in data.items() if key != "x"}, {"x": x, 3: y}
    )
    check(lambda x: collections.defaultdict(list, {"a": [x + 1]}), x)
    check(lambda tensors: tuple(reversed([x * 2 for x in tensors])), [x, y])
    check(lambda x: (x.reshape(1, 3).max(1), x.dtype, x.device, x.size(0)), x)


def test_outputs_of_transformers() -> None:
    def function(x: Tensor) -> BaseModelOutput:
        return BaseModelOutput(last_hidden_state=x * 2, hidden_states=(x, x + 1))

    compiled = neuron(function, fullgraph=True)
    for _ in range(3):
        x = torch.randn(3)
        actual = compiled(x)
        assert type(actual) is BaseModelOutput and list(actual) == list(function(x))
        equal(actual.to_tuple(), function(x).to_tuple())
        equal(actual["last_hidden_state"], x * 2)


def test_containers_that_are_changed() -> None:
    def function(tensors: list[Tensor], table: dict[str, Tensor]) -> Tensor:
        tensors.append(tensors[0] * 2)
        table["z"] = table.pop("x") + tensors[-1]
        tensors[0] = table["z"]
        return tensors[-1] + 1

    compiled = neuron(function)
    for _ in range(3):
        x, y = torch.randn(3), torch.randn(3)
        mine, theirs = ([x], {"x": y}), ([x], {"x": y})
        equal(compiled(*mine), function(*theirs))
        equal(mine, theirs)


def test_generators() -> None:
    def multiples(x: Tensor) -> Iterator[Tensor]:
        for factor in range(3):
            yield x * factor

    def endless(x: Tensor) -> Iterator[Tensor]:
        while True:
            x = x * 2
            yield x

    check(lambda x: sum(multiples(x)), torch.randn(3))
    compiled, without_end = neuron(multiples), neuron(endless)
    expression = neuron(lambda x: (x * factor for factor in range(3)))
    for _ in range(3):
        x = torch.randn(3)
        equal(list(compiled(x)), list(multiples(x)))
        equal(list(expression(x)), list(multiples(x)))
        mine, theirs = without_end(x), endless(x)
        equal([next(mine) for _ in range(3)], [next(theirs) for _ in range(3)])


# ----------------------------------------------------------------------------- tensor subclasses


class Subtracting(torch.Tensor):
    """A subclass for which ``torch.add`` is ``torch.sub``."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.sub if func is torch.add else func
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_subclass_by_torch_function() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return torch.add(x, y) * 2

    compiled = neuron(function)
    for _ in range(3):
        x, y = torch.randn(3).as_subclass(Subtracting), torch.randn(3)
        actual = compiled(x, y)
        assert type(actual) is Subtracting
        equal(actual.as_subclass(Tensor), ((x.as_subclass(Tensor) - y) * 2))


def both(x: TwoTensor) -> tuple[Tensor, Tensor]:
    """The two tensors of a wrapper subclass."""
    return x.a, x.b


@pytest.mark.parametrize("grad", [False, True])
def test_a_wrapper_subclass(grad: bool) -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return (x @ y).sin() + x

    compiled = neuron(function, fullgraph=True)
    for _ in range(3):
        parts, y = (torch.randn(3, 3), torch.randn(3, 3)), torch.randn(3, 3)
        mine, theirs = (TwoTensor(*parts).requires_grad_(grad) for _ in range(2))
        actual, wanted = compiled(mine, y), function(theirs, y)
        assert type(actual) is TwoTensor
        equal(both(actual), both(wanted), **CLOSE)
        if grad:
            actual.sum().backward()
            wanted.sum().backward()
            equal(both(mine.grad), both(theirs.grad), **CLOSE)


def test_parameters_of_a_wrapper_subclass() -> None:
    eager = nn.Linear(3, 3)
    eager.weight = nn.Parameter(TwoTensor(torch.randn(3, 3), torch.randn(3, 3)))
    model = copy.deepcopy(eager)
    compiled = neuron(model)
    for _ in range(3):
        x = torch.randn(2, 3)
        actual, wanted = compiled(x), eager(x)
        equal(both(actual), both(wanted), **CLOSE)
        for result, each in ((actual, model), (wanted, eager)):
            result.sum().backward()
            with torch.no_grad():
                each.weight.sub_(each.weight.grad * 0.1)
            each.zero_grad()
        equal(both(model.weight.data), both(eager.weight.data), **CLOSE)


def test_a_wrapper_subclass_that_is_changed() -> None:
    def function(x: Tensor) -> Tensor:
        x.add_(1)
        return x * 2

    compiled = neuron(function)
    for turn in range(3):
        mine, theirs = (TwoTensor(torch.full((3,), float(turn)), torch.zeros(3)) for _ in range(2))
        equal(both(compiled(mine)), both(function(theirs)))
        equal(both(mine), both(theirs))
