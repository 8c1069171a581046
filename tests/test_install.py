"""The backend as an installed package: no import of ours before ``torch.compile``."""

from __future__ import annotations

import importlib.metadata

import pytest
import torch

import neuron_compile

from .support import cases, in_fresh_interpreter

WAYS = {
    "function": 'compiled = torch.compile(model, backend="neuron")',
    "module": 'model.compile(backend="neuron"); compiled = model',
    "default": 'torch.compiler.set_default_backend("neuron"); compiled = torch.compile(model)',
}


@pytest.mark.parametrize("way", cases(WAYS, slow=("module",)))
def test_every_way_to_choose_the_backend(way: str) -> None:
    in_fresh_interpreter(f"""
        import copy, sys, torch

        class Model(torch.nn.Linear):
            def forward(self, x):
                return super().forward(x).relu()

        model = Model(3, 2)
        eager = copy.deepcopy(model)
        assert "neuron_compile.backend" not in sys.modules
        {WAYS[way]}
        for _ in range(3):
            x = torch.randn(4, 3)
            torch.testing.assert_close(compiled(x), eager(x))
        import neuron_compile
        assert neuron_compile.report().compilations == 1
    """)


def test_import_is_light() -> None:
    in_fresh_interpreter("""
        import sys
        import neuron_compile
        heavy = {"torch", "jax", "jaxlib", "torch_mlir", "numpy"} & set(sys.modules)
        assert not heavy, heavy
    """)


def test_torch_is_as_quick_to_import_as_without() -> None:
    in_fresh_interpreter("""
        import sys
        import torch
        ours = {name for name in sys.modules if name.startswith("neuron_compile")}
        assert ours == {"neuron_compile", "neuron_compile.artifacts"}, ours
        assert not {"jax", "jaxlib", "torch_mlir", "torch._dynamo"} & set(sys.modules)
    """)


def test_public_names_exist() -> None:
    for name in neuron_compile.__all__:
        assert getattr(neuron_compile, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = neuron_compile.nothing


def test_version_is_the_packages() -> None:
    assert importlib.metadata.version("neuron-compile") == neuron_compile.__version__


def test_the_backend_is_listed() -> None:
    assert "neuron" in torch._dynamo.list_backends()


def test_the_users_jax_keeps_its_settings() -> None:
    in_fresh_interpreter("""
        import jax, jax.numpy as jnp, torch
        before = jnp.asarray(1.5) + 1
        torch.compile(lambda x: x.double() * 2, backend="neuron")(torch.ones(3))
        after = jnp.asarray(1.5) + 1
        assert before.dtype == after.dtype == jnp.float32
        assert not jax.config.jax_enable_x64
        assert jax.jit(lambda x: x * 2)(3).item() == 6
    """)
