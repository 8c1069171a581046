"""Packages: what is exported runs as in eager PyTorch, from a file."""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.export import Dim

import neuron_compile
from neuron_compile import InputError, PackageError, SettingsError, UnsupportedError
from neuron_compile.package import describe, verify

from .support import IGNORE_TORCH, equal, in_fresh_interpreter, sharing

pytestmark = IGNORE_TORCH


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    hidden: torch.Tensor | None = None
    loss: torch.Tensor | None = None


torch.export.register_dataclass(Output, serialized_type_name="tests.Output")


class Holds(nn.Module):
    """A module whose forward is a function of it."""

    def __init__(self, function: Callable[..., Any], **held: Any) -> None:
        super().__init__()
        self._function = function
        for name, value in held.items():
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value, persistent=not name.startswith("fixed"))
            else:
                setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self, *args, **kwargs)


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4), nn.Linear(4, 10, bias=False))
    model[2].weight = model[0].weight
    return model


def counts(self: Any, x: torch.Tensor) -> Any:
    self.count.add_(1)
    self.cache[:, 1:].copy_(self.cache[:, :-1].clone())
    self.cache[:, 0] = x
    return self.cache * self.count, self.cache, self.cache[:, :2]


def swap(self: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    kept = x.clone()
    x.copy_(y)
    y.copy_(kept)


def copied(self: Any, x: torch.Tensor) -> torch.Tensor:
    out = x + 1
    x.copy_(out)
    return out


def mutated(self: Any, x: torch.Tensor) -> Any:
    first = x.t()
    x.mul_(2)
    return first, x, x[1:], x.view(-1), x * 1


IMAGE = torch.randn(2, 3, 8, 8)
ROWS = torch.randn(3, 4)

# Each: what makes a model, its arguments, its keyword arguments.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...], dict[str, Any]]] = {
    "channels last": (
        lambda: (
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GELU())
            .eval()
            .to(memory_format=torch.channels_last)
        ),
        (IMAGE.to(memory_format=torch.channels_last),),
        {},
    ),
    "batch norm in training": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)),
        (IMAGE,),
        {},
    ),
    "tied": (tied, (torch.tensor([[1, 2], [9, 0]]),), {}),
    "containers": (
        lambda: Holds(
            lambda self, pair, more, *, scale, name, flag: collections.OrderedDict(
                a=Pair(pair[0] * scale, more["x"] + more[3]), b=[None, 2, 1.5, name, {"x": pair[1]}]
            )
        ),
        ((ROWS, ROWS + 1), {"x": ROWS, 3: ROWS}),
        {"flag": True, "scale": 2.0, "name": "n"},
    ),
    "dataclass": (lambda: Holds(lambda self, x: Output(x.exp(), loss=x.sum())), (ROWS,), {}),
    "struct sequence": (lambda: Holds(lambda self, x: (x * 2).max(dim=1)), (ROWS,), {}),
    "buffers change": (
        lambda: Holds(counts, count=torch.tensor(0), cache=torch.zeros(3, 4)),
        (ROWS[:, 0].contiguous(),),
        {},
    ),
    "fixed buffer": (
        lambda: Holds(
            lambda self, x: x @ self.fixed + torch.tensor([1.0, 2.0]), fixed=torch.randn(4, 2)
        ),
        (ROWS,),
        {},
    ),
    "inputs swapped": (lambda: Holds(swap), (ROWS, ROWS + 1), {}),
    "input written": (lambda: Holds(copied), (ROWS,), {}),
    "views of a mutated input": (lambda: Holds(mutated), (ROWS,), {}),
    "only views": (lambda: Holds(lambda self, x: (x.t(), x, x[1:], None)), (ROWS,), {}),
    "shared results": (lambda: Holds(lambda self, x: ((y := x * 2), y[1:], y.t())), (ROWS,), {}),
    "strided results": (
        lambda: Holds(
            lambda self, x: ((x + 1).t(), (x * 2).expand(2, 4, 3), x.sum(0).expand(5, 3))
        ),
        (ROWS.t(),),
        {},
    ),
    "dtypes": (
        lambda: Holds(
            lambda self, x: (x + self.fixed, x.to(torch.uint16), self.f64 * 2, self.bf16 + x),
            fixed=torch.randn(4, dtype=torch.complex128),
            f64=torch.randn(4, dtype=torch.float64),
            bf16=torch.randn(4, dtype=torch.bfloat16),
        ),
        (torch.arange(12.0).reshape(3, 4),),
        {},
    ),
    "returns a buffer": (
        lambda: Holds(lambda self, x: (self.w, self.w[1:], x @ self.w), w=torch.randn(4, 4)),
        (ROWS,),
        {},
    ),
    "grad modes": (
        lambda: Holds(lambda self, x: _in_grad_modes(x)),
        (ROWS,),
        {},
    ),
    "autocast": (lambda: Holds(lambda self, x: _in_autocast(x)), (ROWS,), {}),
    "no arguments": (lambda: Holds(lambda self: self.w * 2, w=torch.ones(3)), (), {}),
    "empty": (lambda: Holds(lambda self, x: (x * 2, x.sum())), (torch.empty(0, 3),), {}),
    "branch": (
        lambda: Holds(
            lambda self, x: torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x - 1, (x,))
        ),
        (ROWS,),
        {},
    ),
}


def _in_grad_modes(x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        y = x * 2
    with torch.no_grad():
        return y + 1


def _in_autocast(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x @ x.t()


def exported(model: Any, folder: Path, *args: Any, **options: Any) -> Path:
    return neuron_compile.export(model, *args, path=folder / "model.neffpkg", **options)


@pytest.mark.parametrize("name", MODELS)
def test_a_package_does_what_eager_does(name: str, tmp_path: Path) -> None:
    make, args, kwargs = MODELS[name]
    model = make()
    before = copy.deepcopy((args, kwargs, model.state_dict()))
    path = exported(model, tmp_path, args, kwargs)
    assert verify(path) == []
    equal((args, kwargs, model.state_dict()), before)
    package = neuron_compile.load(path, trust=True)
    for call in range(2):
        wanted_args, actual_args = copy.deepcopy(args), copy.deepcopy(args)
        with torch.no_grad():
            wanted = model(*wanted_args, **kwargs)
        actual = package(*actual_args, **kwargs)
        if call == 0:
            assert package.rebuilt() == {"forward": (None,)}
        detached = torch.utils._pytree.tree_map_only(torch.Tensor, torch.detach, wanted)
        tolerance = 1e-2 if name == "autocast" else 1e-5
        equal(actual, detached, tolerance, tolerance)
        equal(actual_args, wanted_args)
        state, eager_state = package.state_dict(), model.state_dict()
        equal(state, {key: eager_state[key] for key in state})
        mine = sharing((actual, actual_args, list(state.values())))
        assert mine == sharing((wanted, wanted_args, [eager_state[key] for key in state]))


@pytest.mark.parametrize("name", ["batch norm in training", "containers", "shared results"])
def test_what_is_not_trusted_is_compiled_again(name: str, tmp_path: Path) -> None:
    make, args, kwargs = MODELS[name]
    model = make()
    package = neuron_compile.load(exported(model, tmp_path, args, kwargs)).prepare()
    assert package.rebuilt() == {"forward": ("the file is not trusted",)}
    with torch.no_grad():
        equal(package(*args, **kwargs), model(*args, **kwargs))


def test_random_numbers_are_drawn_from_the_generator(tmp_path: Path) -> None:
    model = nn.Dropout(0.25)
    x = torch.ones(4000)
    package = neuron_compile.load(exported(model, tmp_path, (x,)), trust=True)
    torch.manual_seed(3)
    first, second = package(x), package(x)
    torch.manual_seed(3)
    assert torch.equal(package(x), first)
    assert not torch.equal(first, second)
    assert abs(float((first == 0).float().mean()) - 0.25) < 0.05
    assert set(first.unique().tolist()) == {0.0, float(model(x).max())}


# ------------------------------------------------------------------------ shapes, entry points


class Decoder(nn.Module):
    """Two functions of one module that share weights and a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.register_buffer("cache", torch.zeros(6, 8), persistent=False)

    def prefill(self, tokens: torch.Tensor) -> torch.Tensor:
        self.cache[: tokens.shape[0]] = self.embed(tokens)
        return self.cache.sum(0) @ self.embed.weight.t()

    def decode(self, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        self.cache[position] = self.embed(token)
        return self.cache.sum(0) @ self.embed.weight.t()


def test_entry_points_share_weights_and_buffers(tmp_path: Path) -> None:
    model = Decoder()
    prefill, decode = (torch.tensor([1, 2, 3]),), (torch.tensor(4), torch.tensor([3]))
    path = neuron_compile.export(
        entry_points={"prefill": (model.prefill, prefill), "decode": (model.decode, decode)},
        path=tmp_path / "decoder.neffpkg",
    )
    names = [item.names for item in describe(path).weights]
    assert names == [["embed.weight"], ["cache"]]
    package = neuron_compile.load(path, trust=True)
    assert package.entry_points == ("prefill", "decode")
    with torch.no_grad():
        equal(package["prefill"](*prefill), model.prefill(*prefill))
        equal(package["decode"](*decode), model.decode(*decode))
        equal(package["decode"](position=decode[1], token=decode[0]), model.decode(*decode))
    with pytest.raises(PackageError, match="prefill, decode"):
        package(*prefill)
    with pytest.raises(PackageError, match="no 'encode'"):
        package["encode"]


def test_two_models_whose_weights_have_one_name(tmp_path: Path) -> None:
    one, two, x = nn.Linear(4, 4), nn.Linear(4, 4), torch.randn(2, 4)
    path = neuron_compile.export(
        entry_points={"one": (one, (x,)), "two": (two, (x,))}, path=tmp_path / "x.neffpkg"
    )
    package = neuron_compile.load(path, trust=True)
    assert len(package.state_dict()) == 4
    with torch.no_grad():
        equal((package["one"](x), package["two"](x)), (one(x), two(x)))


def test_several_examples_make_several_programs(tmp_path: Path) -> None:
    model = Holds(lambda self, x, mask=None: x * self.w if mask is None else x * mask, w=ROWS[0])
    examples = [(ROWS,), (ROWS[:2],), (ROWS.t().contiguous().t(),)]
    path = exported(model, tmp_path, [*examples, (ROWS,)], [{}, {}, {}, {"mask": ROWS > 0}])
    package = neuron_compile.load(path, trust=True)
    assert len(describe(path).entry_points["forward"]) == 4
    for args in examples:
        equal(package(*args), model(*args))
    equal(package(ROWS, mask=ROWS > 0), model(ROWS, mask=ROWS > 0))


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, y: dict[str, torch.Tensor]) -> Any:
        return self.linear(x).sum(1), y["a"].reshape(x.shape[0], 2) * x.shape[0], x.shape[0]


def test_dynamic_shapes_get_a_program_for_each_size(tmp_path: Path) -> None:
    model, batch = Doubled(), Dim("batch", min=2, max=8)
    shapes = {"x": {0: batch}, "y": {"a": {0: 2 * batch}}}

    def call(size: int) -> tuple[Any, ...]:
        return torch.randn(size, 4), {"a": torch.randn(2 * size)}

    path = exported(model, tmp_path, call(3), None, shapes, sizes={"batch": [2, 5]})
    package = neuron_compile.load(path, trust=True)
    for size in (2, 5):
        args = call(size)
        with torch.no_grad():
            equal(package(*args), model(*args))
    with pytest.raises(InputError, match=r"x: float32\[3, 4\].*has x: float32\[2, 4\]"):
        package(*call(3))
    several = exported(model, tmp_path, [call(3), call(4)], None, shapes)
    package = neuron_compile.load(several, trust=True)
    args = call(4)
    with torch.no_grad():
        equal(package(*args), model(*args))


@pytest.mark.parametrize(
    "sizes, examples, words",
    [
        (None, 1, "sizes="),
        ({"batch": [9]}, 1, "2 to 8"),
        ({"other": [3]}, 1, "no Dim is named 'other'; dynamic_shapes has batch"),
        (None, 2, "has the size 5"),
    ],
)
def test_wrong_sizes_are_refused(sizes: Any, examples: int, words: str, tmp_path: Path) -> None:
    batch = Dim("batch", min=2, max=8)
    shapes = {"x": {0: batch}, "y": {"a": {0: 2 * batch}}}
    call = (torch.randn(3, 4), {"a": torch.randn(6)})
    args = [call, (torch.randn(4, 5), {"a": torch.randn(8)})] if examples == 2 else call
    with pytest.raises(PackageError, match=words):
        exported(Doubled(), tmp_path, args, None, shapes, sizes=sizes)


# ------------------------------------------------------------------------------------ inputs


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> neuron_compile.Package:
    """A package whose arguments are nested."""

    def function(x: torch.Tensor, more: Any, scale: float = 2.0, *, out: Any = None) -> Any:
        more[0].add_(1)
        return x * scale + more[1]["y"]

    path = tmp_path_factory.mktemp("package") / "model.neffpkg"
    args = (ROWS, [ROWS.clone(), {"y": ROWS + 1}], 2.0)
    neuron_compile.export(function, args, {"out": None}, path=path)
    return neuron_compile.load(path, trust=True)


def given(**changes: Any) -> dict[str, Any]:
    return {"x": ROWS, "more": [ROWS.clone(), {"y": ROWS}], "scale": 2.0, "out": None, **changes}


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"x": ROWS[:2]}, r"x: float32\[2, 4\]; the package has x: float32\[3, 4\]"),
        ({"x": ROWS.double()}, r"x: float64\[3, 4\]"),
        ({"x": torch.randn(4, 3).t()}, r"x: float32\[3, 4\] with strides \[1, 3\]"),
        ({"x": ROWS.to("meta")}, "x is on meta"),
        ({"x": ROWS.to_sparse()}, "x is on cpu, torch.sparse_coo"),
        ({"x": "text"}, "x: 'text'"),
        ({"x": object()}, "x is a object"),
        ({"more": (ROWS, {"y": ROWS})}, "more: a list of 2 is wanted, not a tuple of 2"),
        ({"more": [ROWS]}, "more: a list of 2 is wanted, not a list of 1"),
        ({"more": [ROWS, {"z": ROWS}]}, r"more\[1\]: a dict with the keys \['y'\]"),
        ({"more": [ROWS, {"y": ROWS[0]}]}, r"more\[1\]\['y'\]: float32\[4\]"),
        ({"scale": 3.0}, "scale: 3.0; the package has scale: 2.0"),
        ({"scale": 2}, "scale: 2; the package has scale: 2.0"),
        ({"extra": 1}, "not exported: extra"),
        ({"more": [ROWS, {"y": ROWS}]}, "share memory.*clone"),
    ],
)
def test_wrong_arguments_are_named(
    changes: dict[str, Any], words: str, package: neuron_compile.Package
) -> None:
    with pytest.raises(InputError, match=words):
        package(**given(**changes))


def test_arguments_are_given_in_any_way(package: neuron_compile.Package) -> None:
    named = given()
    wanted = ROWS * 2 + ROWS
    equal(package(**named), wanted)
    equal(package(named["x"], named["more"], 2.0, out=None), wanted)
    with pytest.raises(InputError, match="missing: more"):
        package(ROWS, scale=2.0, out=None)
    with pytest.raises(InputError, match="x is given twice"):
        package(ROWS, **named)
    with pytest.raises(InputError, match="takes 3 arguments by position"):
        package(1, 2, 3, 4)


def test_checks_are_made(tmp_path: Path) -> None:
    path = exported(Holds(lambda self, x, i: x[i]), tmp_path, (ROWS, torch.tensor([1])))
    package = neuron_compile.load(path, trust=True)
    with pytest.raises(IndexError, match="out of range"):
        package(ROWS, torch.tensor([3]))


# ----------------------------------------------------------------------------------- weights


def test_weights_can_be_left_out(tmp_path: Path) -> None:
    model, tokens = tied(), torch.tensor([1, 2])
    path = exported(model, tmp_path, (tokens,), weights=False)
    assert not describe(path).has_weights
    with pytest.raises(PackageError, match="without its weights"):
        neuron_compile.load(path)
    other = tied()
    state = other.state_dict()
    del state["2.weight"]  # tied to the first
    with torch.no_grad():
        equal(neuron_compile.load(path, trust=True, weights=state)(tokens), other(tokens))
        safetensors.torch.save_file(state, tmp_path / "weights.safetensors")
        package = neuron_compile.load(path, trust=True, weights=tmp_path / "weights.safetensors")
        equal(package(tokens), other(tokens))


@pytest.fixture(scope="module")
def without_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("package")
    return exported(tied(), folder, (torch.tensor([1]),), weights=False)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"1.bias": None}, "1.bias is missing"),
        ({"1.bias": torch.zeros(5)}, r"1.bias is float32\[5\], not float32\[4\]"),
        ({"1.bias": torch.zeros(4).double()}, r"1.bias is float64\[4\]"),
        ({"2.weight": torch.zeros(10, 4)}, "0.weight and 2.weight were one tensor"),
    ],
)
def test_weights_that_do_not_fit_are_named(
    change: dict[str, Any], words: str, without_weights: Path
) -> None:
    state = {k: v for k, v in {**tied().state_dict(), **change}.items() if v is not None}
    if "2.weight" not in change:
        state["2.weight"] = state["0.weight"]
    with pytest.raises(PackageError, match=words):
        neuron_compile.load(without_weights, weights=state)


def test_given_buffers_are_not_written_to(tmp_path: Path) -> None:
    model = nn.BatchNorm1d(4)
    path = exported(model, tmp_path, (ROWS,), weights=False)
    state = copy.deepcopy(model.state_dict())
    package = neuron_compile.load(path, trust=True, weights=state)
    with torch.no_grad():
        equal(package(ROWS), copy.deepcopy(model)(ROWS))
    equal(dict(state), dict(model.state_dict()))
    assert int(package.state_dict()["num_batches_tracked"]) == 1


def test_tied_weights_and_unused_ones_are_stored_once_and_never(tmp_path: Path) -> None:
    model = tied()
    model.register_buffer("unused", torch.zeros(100_000))
    path = exported(model, tmp_path, [(torch.tensor([1]),), (torch.tensor([1, 2]),)])
    assert sorted(item.names for item in describe(path).weights) == [
        ["0.weight", "2.weight"],
        ["1.bias"],
        ["1.weight"],
    ]
    assert describe(path).size < 400_000


# ----------------------------------------------------------------------- what cannot be exported


def test_unsupported_operators_are_listed(tmp_path: Path) -> None:
    model = Holds(lambda self, x: torch.nonzero(x).sum() + torch.unique(x).sum())
    with pytest.raises(UnsupportedError, match="nonzero") as caught:
        exported(model, tmp_path, (ROWS,))
    assert "unique" in str(caught.value)
    assert "no eager PyTorch" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_eager_random_numbers_need_eager(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="eager_rng"):
        exported(nn.Dropout(), tmp_path, (ROWS,), options={"eager_rng": True})


def _overlapping() -> nn.Module:
    """A buffer that changes and is a part of another."""
    whole = torch.zeros(4)
    function = lambda self, x: (self.part.add_(x[0, 0]), self.whole + 1)  # noqa: E731
    return Holds(function, whole=whole, part=whole[1:])


@pytest.mark.parametrize(
    "model, args, options, words",
    [
        (nn.Linear(4, 4), ROWS, {}, "args must be a tuple"),
        (nn.Linear(4, 4), ((ROWS,), (ROWS,)), {}, "takes 1 arguments by position, not 2"),
        (nn.Linear(4, 4), (ROWS,), {"sizes": {"batch": [1]}}, "dynamic_shapes is needed"),
        (Holds(lambda self, x: (x, {1.5: x})), (ROWS,), {}, "has the keys"),
        (_overlapping(), (ROWS,), {}, "part is written to and shares memory"),
    ],
    ids=["no tuple", "nested", "sizes", "keys", "overlapping buffers"],
)
def test_what_a_package_cannot_hold_is_refused(
    model: Any, args: Any, options: Any, words: str, tmp_path: Path
) -> None:
    with pytest.raises(PackageError, match=words):
        exported(model, tmp_path, args, **options)
    assert not list(tmp_path.iterdir())


def test_an_example_given_twice_is_two_arguments(tmp_path: Path) -> None:
    weight = torch.randn(3, 4)
    model = Holds(lambda self, x, y, z: (x.add_(y * 2), z - self.w), w=weight)
    path = exported(model, tmp_path, (ROWS, ROWS, weight))
    package = neuron_compile.load(path, trust=True)
    args = (torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 4))
    wanted = model(args[0].clone(), *args[1:])
    equal(package(args[0].clone(), *args[1:]), wanted)
    with pytest.raises(InputError, match="share memory"):
        package(args[0], args[0], args[2])


def test_a_folder_that_is_not_there_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is no folder"):
        exported(nn.Linear(4, 4), tmp_path / "x", (ROWS,))


def test_a_wrong_option_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="unknown option"):
        exported(nn.Linear(4, 4), tmp_path, (ROWS,), options={"plattform": "cpu"})


def test_entry_points_or_a_model(tmp_path: Path) -> None:
    for arguments in ({}, {"model": nn.Linear(4, 4), "entry_points": {}}, {"entry_points": {}}):
        with pytest.raises(PackageError):
            neuron_compile.export(**arguments, path=tmp_path / "x")
    with pytest.raises(PackageError, match="must be"):
        neuron_compile.export(entry_points={"a": nn.Linear(4, 4)}, path=tmp_path / "x")


# ------------------------------------------------------------------------------ other processes

BLOCK = """
import importlib.abc, sys
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch_mlir" or name.startswith(
            ("torch._dynamo", "neuron_compile.lowering", "tests", "transformers")
        ):
            raise ImportError(f"{name} is not here")
sys.meta_path.insert(0, Block())
"""


def test_it_loads_without_torch_mlir_and_dynamo(tmp_path: Path) -> None:
    model = Holds(
        lambda self, x: Output(self.norm(self.linear(x)).relu(), Pair(x * 2, x.sum())),
        linear=nn.Linear(4, 4),
        norm=nn.BatchNorm1d(4),
    )
    path = exported(model, tmp_path, (ROWS,))
    with torch.no_grad():
        wanted = copy.deepcopy(model)(ROWS)
    torch.save((ROWS, wanted.logits, tuple(wanted.hidden)), tmp_path / "wanted.pt")
    in_fresh_interpreter(
        BLOCK
        + f"""
import torch
import neuron_compile
x, logits, pair = torch.load({str(tmp_path / "wanted.pt")!r})
for trust in (True, False):
    package = neuron_compile.load({str(path)!r}, trust=trust)
    found = package(x)
    torch.testing.assert_close(found.logits, logits)
    torch.testing.assert_close((found.hidden.first, found.hidden.second), pair)
    assert type(found).__name__ == "Record" and type(found.hidden).__name__ == "Pair"
    assert package.rebuilt()["forward"] == (None if trust else "the file is not trusted",)
    assert int(package.state_dict()["norm.num_batches_tracked"]) == 1
    assert "linear.weight" in package.to_jax().weights
loaded = [name for name in sys.modules if name.startswith(("torch_mlir", "torch._dynamo"))]
assert not loaded, loaded
"""
    )
