"""Packed weights: kept while a parameter stays as it is, made anew whenever it changes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from neuron_compile.runtime import static_memory
from tests.support import neuron


def convolution(channels: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), nn.ReLU()).eval()


IMAGE = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(1))


def same(call: Callable[..., torch.Tensor], model: nn.Module, times: int = 3) -> int:
    """Compare a few calls with eager's; how many weights were packed meanwhile."""
    before = static_memory.made()
    with torch.no_grad():
        for _ in range(times):
            torch.testing.assert_close(call(IMAGE), model(IMAGE), rtol=1e-4, atol=1e-5)
    return static_memory.made() - before


def test_a_weight_is_packed_once() -> None:
    model = convolution()
    call = neuron(model)
    assert same(call, model, times=1) == 0  # it may change with each call: nobody knows yet
    assert same(call, model, times=5) == 1
    assert same(call, model, times=5) == 0


def replace(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(torch.randn_like(model[0].weight))


def swap_data(model: nn.Module) -> None:
    model[0].weight.data = torch.randn_like(model[0].weight)


def restride(model: nn.Module) -> None:
    weight = torch.randn_like(model[0].weight).to(memory_format=torch.channels_last)
    model[0].weight = nn.Parameter(weight)


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "in place": lambda model: model[0].weight.mul_(2),
    "one element": lambda model: model[0].weight[3, 1, 1, 1].fill_(7),
    "through data": lambda model: model[0].weight.data.mul_(2),
    "through NumPy": lambda model: model[0].weight.detach().numpy().__imul__(2),
    "through a view": lambda model: model[0].weight.view(-1).add_(1),
    "replaced": replace,
    "data replaced": swap_data,
    "other strides": restride,
    "loaded": lambda model: model.load_state_dict(
        {name: value * 3 for name, value in model.state_dict().items()}
    ),
    "NaN": lambda model: model[0].weight.fill_(float("nan")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_weight_is_seen(change: str) -> None:
    model = convolution()
    call = neuron(model)
    assert same(call, model) == 1
    with torch.no_grad():
        CHANGES[change](model)
    before = static_memory.made()
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(
                call(IMAGE), model(IMAGE), rtol=1e-4, atol=1e-5, equal_nan=True
            )
    assert static_memory.made() - before <= 1


def test_training_packs_nothing() -> None:
    torch.manual_seed(0)
    layers = (layer for width in (3, 8, 8) for layer in (nn.Conv2d(width, 8, 3), nn.Tanh()))
    model = nn.Sequential(*layers)
    call = neuron(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = static_memory.made()
    for _ in range(4):
        optimizer.zero_grad()
        call(IMAGE).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            torch.testing.assert_close(call(IMAGE), model(IMAGE), rtol=1e-4, atol=1e-5)
    # The eval call that follows a step finds other values each time.
    assert static_memory.made() == before


def test_an_address_that_is_used_again_is_another_weight() -> None:
    storage = torch.empty(64 + 8 * 27)
    offset = -storage.data_ptr() % 64 // 4
    call = neuron(lambda weight, x: nn.functional.conv2d(x, weight))
    holder = nn.Module()
    for step in range(4):
        # The same bytes each time, as an allocator gives them again.
        values = torch.randn(8, 3, 3, 3, generator=torch.Generator().manual_seed(step))
        data = storage[offset : offset + 8 * 27].view(8, 3, 3, 3)
        data.detach().numpy()[:] = values.numpy()
        holder.weight = nn.Parameter(data)
        with torch.no_grad():
            for _ in range(3):
                torch.testing.assert_close(
                    call(holder.weight, IMAGE), nn.functional.conv2d(IMAGE, values)
                )


def test_what_is_kept_goes_with_its_holders() -> None:
    storage = torch.zeros(16)
    address = storage.data_ptr()
    first = static_memory.hold(storage[:8])
    assert first is static_memory.hold(storage[:8]) is static_memory.at(address)
    assert static_memory.hold(storage[:4]) is not first  # other elements at the same address
    kept = weakref.ref(first)
    del first
    gc.collect()
    assert kept() is None
    assert static_memory.at(address) is None
    again = static_memory.hold(storage[:8])
    assert again is not None
    assert again.kept("key", list) is None  # nothing is known of the values of a new tensor


def test_two_graphs_share_a_weight() -> None:
    model = convolution()
    call = neuron(model)
    other = neuron(lambda x: model(x).square())
    assert same(call, model) == 1
    before = static_memory.made()
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(other(IMAGE), model(IMAGE).square(), rtol=1e-4, atol=1e-4)
        assert static_memory.made() == before
        model[0].weight.mul_(2)
    assert same(call, model) == 1


def test_changes_of_another_parameter_over_the_same_memory_are_seen() -> None:
    model, other = convolution(), convolution()
    other[0].weight = nn.Parameter(model[0].weight.data)
    call, second = neuron(model), neuron(lambda x: other(x).square())
    same(call, model)
    with torch.no_grad():
        for _ in range(3):
            second(IMAGE)
        other[0].weight[3, 1, 1, 1] = 7  # which a sample may miss
    same(call, model)


def test_packing_can_be_switched_off() -> None:
    model = convolution()
    call = neuron(model, options={"pack_weights": False})
    assert same(call, model) == 0
    with torch.no_grad():
        model[0].weight.data[3, 1, 1, 1] = 7  # which a sample may miss
    assert same(call, model) == 0


def test_tensors_of_inference_mode_are_not_packed() -> None:
    with torch.inference_mode():
        model = convolution()
        call = neuron(model)
        before = static_memory.made()
        for factor in (1.0, 2.0):
            model[0].weight.mul_(factor)
            for _ in range(3):
                torch.testing.assert_close(call(IMAGE), model(IMAGE), rtol=1e-4, atol=1e-5)
        assert static_memory.made() == before


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("padding", [0, "same", 3])
@pytest.mark.parametrize("bias", [True, False])
def test_packed_convolutions(groups: int, dilation: int, padding: int | str, bias: bool) -> None:
    torch.manual_seed(0)
    stride = 1 if padding == "same" else 2
    model = nn.Conv2d(
        4, 8, 3, stride=stride, padding=padding, dilation=dilation, groups=groups, bias=bias
    ).eval()
    call = neuron(model)
    before = static_memory.made()
    with torch.no_grad():
        for sizes in ((2, 4, 12, 12), (1, 4, 9, 14)):
            torch._dynamo.mark_static(x := torch.randn(sizes))
            for _ in range(3):
                torch.testing.assert_close(call(x), model(x), rtol=1e-4, atol=1e-5)
    assert static_memory.made() > before
