"""A package's entry points as functions of JAX, against eager PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import neuron_compile
from neuron_compile import InputError
from neuron_compile.runtime import RuntimeCompileError

from .support import IGNORE_TORCH
from .test_package import IMAGE, MODELS, ROWS, Holds, Pair, tied

pytestmark = IGNORE_TORCH


def array(value: Any) -> Any:
    return jnp.asarray(value.detach().numpy()) if isinstance(value, torch.Tensor) else value


def arrays(tree: Any) -> Any:
    return torch.utils._pytree.tree_map(array, tree)


def same(found: Any, wanted: Any) -> None:
    """Leaves in order, whatever holds them."""
    mine = jax.tree.leaves(found)
    theirs = [x for x in torch.utils._pytree.tree_leaves(wanted) if isinstance(x, torch.Tensor)]
    mine = [x for x in mine if isinstance(x, jax.Array)]
    assert len(mine) == len(theirs)
    for left, right in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(np.asarray(left), right.detach().numpy(), rtol=1e-5, atol=1e-5)


def function(model: Any, folder: Path, *args: Any) -> Any:
    path = neuron_compile.export(model, *args, path=folder / "model.neffpkg")
    return neuron_compile.load(path, trust=True).to_jax()


def test_a_convolution_composes_with_jax(tmp_path: Path) -> None:
    make, args, _ = MODELS["channels last"]
    model = make()
    run = function(model, tmp_path, args)

    def scaled(weights: Any, x: jax.Array) -> jax.Array:
        return jnp.tanh(run(weights, x * 0.5)).sum()

    with torch.no_grad():
        wanted = torch.tanh(model(args[0] * 0.5)).sum()
    x = jnp.asarray(args[0].contiguous().numpy())
    np.testing.assert_allclose(jax.jit(scaled)(run.weights, x), wanted.numpy(), rtol=1e-5)
    np.testing.assert_allclose(scaled(run.weights, x), wanted.numpy(), rtol=1e-5)


def test_integers_are_narrow_where_jax_has_no_wide_ones(tmp_path: Path) -> None:
    model, tokens = tied(), torch.tensor([[1, 2], [9, 0]])
    run = function(model, tmp_path, (tokens,))
    narrow = jnp.asarray(tokens.numpy().astype(np.int32))
    with torch.no_grad():
        same(jax.jit(run)(run.weights, narrow), model(tokens))
    with jax.enable_x64(True):
        wide = function(model, tmp_path, (tokens,))
        with torch.no_grad():
            same(jax.jit(wide)(wide.weights, jnp.asarray(tokens.numpy())), model(tokens))


@pytest.mark.parametrize("name", ["shared results", "strided results", "dataclass", "only views"])
def test_structures_and_views(name: str, tmp_path: Path) -> None:
    make, args, _ = MODELS[name]
    model = make()
    run = function(model, tmp_path, args)
    with torch.no_grad():
        same(jax.jit(run)(run.weights, *arrays(args)), model(*args))


def test_containers(tmp_path: Path) -> None:
    def model(pair: Any, more: Any, *, scale: float) -> Any:
        return {"a": Pair(pair[0] * scale, more["x"] + more["y"]), "b": [None, 2, (pair[1],)]}

    args, kwargs = ((ROWS, ROWS + 1), {"x": ROWS, "y": ROWS}), {"scale": 2.0}
    run = function(model, tmp_path, args, kwargs)
    found = jax.jit(lambda pair, more: run({}, pair, more, **kwargs))(*arrays(args))
    wanted = model(*args, **kwargs)
    assert found["a"]._fields == ("first", "second")
    assert found["b"][:2] == [None, 2]
    same(found["a"], wanted["a"])
    same(found["b"][2], wanted["b"][2])


@pytest.mark.parametrize("name", ["buffers change", "inputs swapped", "views of a mutated input"])
def test_changes_are_returned(name: str, tmp_path: Path) -> None:
    make, args, _ = MODELS[name]
    model = make()
    run = function(model, tmp_path, args)
    weights, given = run.weights, arrays(args)
    results, changes = jax.jit(run)(weights, *given)
    changed = tuple(torch.clone(x) for x in args)
    with torch.no_grad():
        wanted = model(*changed)
    same(results, wanted)
    state = {**model.state_dict(), "args[0]": changed[0], "args[1]": changed[-1]}
    assert changes
    for key, value in changes.items():
        same(value, state[key])
    same(weights, make().state_dict() or {})  # a pure function


def test_random_numbers_take_a_seed(tmp_path: Path) -> None:
    run = function(nn.Dropout(0.5), tmp_path, (torch.ones(1000),))
    x = jnp.ones(1000)
    one, again, other = (np.asarray(run({}, x, seed=seed)) for seed in (1, 1, 2))
    assert (one == again).all()
    assert (one != other).any()
    assert set(np.unique(one)) == {0.0, 2.0}
    with pytest.raises(InputError, match="seed="):
        run({}, x)


def test_what_jax_is_given_is_checked(tmp_path: Path) -> None:
    run = function(nn.Linear(4, 2), tmp_path, (ROWS,))
    x = jnp.asarray(ROWS.numpy())
    with pytest.raises(InputError, match=r"float32\[2, 4\]; the package has .*float32\[3, 4\]"):
        run(run.weights, x[:2])
    with pytest.raises(InputError, match="no 'weight'"):
        run({"bias": run.weights["bias"]}, x)
    with pytest.raises(InputError, match="'bias' is"):
        run({**run.weights, "bias": x}, x)
    with pytest.raises(InputError, match="neither a tensor"):
        run(run.weights, ROWS)


def test_float64_needs_jax_to_have_it(tmp_path: Path) -> None:
    model, x = nn.Linear(4, 2).double(), ROWS.double()
    run = function(model, tmp_path, (x,))
    with pytest.raises(RuntimeCompileError, match="jax_enable_x64"):
        run(run.weights, jnp.asarray(x.numpy().astype(np.float32)))
    with jax.enable_x64(True):
        run = function(model, tmp_path, (x,))
        with torch.no_grad():
            wanted = model(x).numpy()
        found = jax.jit(run)(run.weights, jnp.asarray(x.numpy()))
        np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-12)


def test_complex_views(tmp_path: Path) -> None:
    model = Holds(lambda self, x: torch.view_as_real(torch.view_as_complex(x) * 2j))
    x = IMAGE.reshape(-1, 2)
    run = function(model, tmp_path, (x,))
    same(jax.jit(run)({}, jnp.asarray(x.numpy())), model(x))
