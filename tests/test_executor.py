"""What crosses between torch and PJRT: shared memory, kept buffers, plans of the results."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from neuron_compile.runtime import Executor, pjrt
from neuron_compile.runtime.executor import draw_seed

from .support import equal, in_fresh_interpreter, neuron


def aligned(*shape: int) -> torch.Tensor:
    """A random tensor; torch allocates at addresses that XLA can share."""
    tensor = torch.randn(*shape)
    assert tensor.data_ptr() % 64 == 0
    return tensor


def record_imports(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The addresses of each tensor imported from now on, and of the buffer made from it."""
    seen: list[tuple[int, int]] = []
    real = pjrt.importer

    def importer(platform: str) -> Callable[[torch.Tensor], Any]:
        load = real(platform)

        def recorded(tensor: torch.Tensor) -> Any:
            buffer = load(tensor)
            seen.append((tensor.data_ptr(), pjrt.pointer(buffer)))
            return buffer

        return recorded

    monkeypatch.setattr(pjrt, "importer", importer)
    return seen


# ------------------------------------------------------------------------------------- copies


LAYOUTS: dict[str, Callable[..., torch.Tensor]] = {
    "contiguous": aligned,
    "transposed": lambda a, b, c, d: aligned(a, b, d, c).transpose(2, 3),
    "channels_last": lambda a, b, c, d: aligned(a, b, c, d).to(memory_format=torch.channels_last),
    "permuted": lambda a, b, c, d: aligned(a, b, c, d).permute(3, 1, 0, 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dense_inputs_are_not_copied(
    layout: str, executors: list[Executor], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = record_imports(monkeypatch)
    compiled = neuron(lambda x: x * 2)
    inputs = [LAYOUTS[layout](20, 30, 14, 15) for _ in range(3)]  # all alive
    for x in inputs:
        equal(compiled(x), x * 2)
    (executor,) = executors
    assert executor.copies == 0
    assert seen == [(x.data_ptr(), x.data_ptr()) for x in inputs]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_input_that_comes_again_is_imported_no_more(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = record_imports(monkeypatch)
    compiled = neuron(lambda x: x * 2)
    x = LAYOUTS[layout](20, 30, 14, 15)
    for _ in range(5):
        equal(compiled(x), x * 2)
        x += 1
    assert len(seen) == 2
    x.data = LAYOUTS[layout](20, 30, 14, 15)  # the same tensor, other memory
    for _ in range(3):
        equal(compiled(x), x * 2)
    assert len(seen) == 4


def test_other_tensors_at_an_address_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = record_imports(monkeypatch)
    compiled = neuron(lambda x: x * 2)
    addresses = set()
    for step in range(12):
        x = torch.full((100, 100), float(step))
        equal(compiled(x), x * 2)
        addresses.add(x.data_ptr())
        del x
    assert len(addresses) < 12  # or this test has shown nothing
    assert all(tensor == buffer for tensor, buffer in seen)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_small_inputs_are_copied_to_memory_that_stays(
    layout: str, executors: list[Executor], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = record_imports(monkeypatch)
    compiled = neuron(lambda x: x * 2)
    results = []
    for _ in range(4):
        x = LAYOUTS[layout](2, 3, 4, 5)
        results.append((compiled(x), x * 2))
    for actual, expected in results:
        equal(actual, expected)
    assert executors[0].copies == 0
    assert len(seen) == 1


def test_small_inputs_of_several_threads() -> None:
    compiled = neuron(lambda x: (x * 2 + 1).tanh().sum(1))
    compiled(torch.ones(8, 8))
    wrong = []

    def call(number: int) -> None:
        x = torch.full((8, 8), float(number) / 8)
        expected = (x * 2 + 1).tanh().sum(1)
        for _ in range(300):
            if not torch.allclose(compiled(x), expected):
                wrong.append(number)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("layout", ["strided", "expanded", "unaligned"])
def test_other_layouts_are_copied_once_a_call(
    layout: str, executors: list[Executor], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = record_imports(monkeypatch)
    x = {
        "strided": lambda: aligned(8000, 3)[::2],
        "expanded": lambda: aligned(3000, 1).expand(3000, 4),
        "unaligned": lambda: aligned(13000)[1:],
    }[layout]()
    compiled = neuron(lambda x: x * 2)
    for _ in range(3):
        equal(compiled(x).contiguous(), (x * 2).contiguous())
    assert executors[0].copies == 3
    assert len(seen) == 3 and all(tensor == buffer for tensor, buffer in seen), "and not by XLA"


def test_a_check_after_large_unaligned_inputs_does_not_hang() -> None:
    """It did while XLA made the copies: its pool waited for the GIL that the reader held."""
    in_fresh_interpreter("""
        import faulthandler
        import torch

        faulthandler.dump_traceback_later(100, exit=True)
        index = torch.randint(0, 50, (100_001,))[1:]
        weight = torch.randn(50 * 64 + 1)[1:].view(50, 64)
        options = {"check_indices": True}
        take = torch.compile(torch.nn.functional.embedding, backend="neuron", options=options)
        for _ in range(20):
            assert torch.equal(take(index, weight), weight[index])
    """)


def test_parameters_are_imported_once(
    executors: list[Executor], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = record_imports(monkeypatch)
    model = nn.Linear(16, 16)
    compiled = neuron(model)
    x = aligned(4, 16)
    with torch.no_grad():
        for _ in range(3):
            compiled(x)
            model.weight.mul_(1.5)
            equal(compiled(x), model(x))
    addresses = [tensor for tensor, _ in seen]
    assert addresses.count(model.weight.data_ptr()) == 1
    assert addresses.count(model.bias.data_ptr()) == 1
    assert addresses.count(x.data_ptr()) == 0  # it is small
    assert executors[0].copies == 0


def test_parameters_of_a_backward_are_imported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = record_imports(monkeypatch)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    compiled = neuron(model)
    for _ in range(4):
        compiled(aligned(4, 16)).sum().backward()
    addresses = [tensor for tensor, _ in seen]
    # Once for the forward's executable, and once for the backward's.
    assert addresses.count(model[2].weight.data_ptr()) <= 2


def test_a_replaced_parameter_is_imported_again(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = record_imports(monkeypatch)
    model = nn.Linear(16, 16)
    compiled = neuron(model)
    x = aligned(4, 16)
    weights = [aligned(16, 16) for _ in range(3)]  # all alive: no address comes twice
    with torch.no_grad():
        for weight in weights:
            model.weight.data = weight
            for _ in range(2):
                equal(compiled(x), model(x))
            assert [t for t, _ in seen].count(model.weight.data_ptr()) == 1


def test_an_unaligned_parameter_is_copied_at_each_call(executors: list[Executor]) -> None:
    model = nn.Linear(16, 16)
    flat = torch.randn(300)
    model.weight.data = flat[3:259].view(16, 16)
    compiled = neuron(model)
    x = aligned(4, 16)
    with torch.no_grad():
        for turn in range(3):
            flat.mul_(1.1)
            equal(compiled(x), model(x))
            assert executors[0].copies == turn + 1


def test_inputs_are_released_after_a_call() -> None:
    compiled = neuron(lambda x: x * 2)
    x = aligned(1000)
    result = compiled(x)
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None
    equal(result.shape, torch.Size([1000]))


# -------------------------------------------------------------------------- plans of the results

PLANS: dict[str, tuple[Callable[[torch.Tensor], Any], list[tuple[str, str]]]] = {
    "contiguous": (lambda x: x * 2, [("tensor", "")]),
    "transposed": (lambda x: x.t() * 2, [("tensor", "permutation")]),
    "expanded": (lambda x: (x * 2).sum(0).expand(3, 4), [("tensor", "expand")]),
    "gaps": (lambda x: (x * 2)[:, ::2], [("tensor", "stride")]),
    "shared": (lambda x: ((y := x * 2), y.t()), [("tensor", ""), ("tensor", "view")]),
    "nothing": (lambda x: (x * 2, None), [("tensor", "")]),
}


@pytest.mark.parametrize("name", PLANS)
def test_plans(name: str, executors: list[Executor]) -> None:
    function, wanted = PLANS[name]
    neuron(function)(aligned(3, 4))
    ways = ("permutation", "expand", "stride", "view")
    found = [
        (spec.kind, next((way for way in ways if getattr(spec, way) is not None), ""))
        for spec in executors[0].signature.results
    ]
    assert found == wanted


def test_saved_inputs_and_their_views_are_not_copied(executors: list[Executor]) -> None:
    model = nn.Linear(8, 8)
    x = aligned(4, 8).requires_grad_()
    neuron(model)(x).sum().backward()
    forward = executors[0].signature
    tensors = [spec for spec in forward.results if spec.kind == "tensor"]
    saved = [spec for spec in forward.results if spec.kind == "input"]
    assert len(tensors) == 1, "only the result itself is computed"
    assert saved, "inputs are saved for the backward as they are"


def test_results_are_fresh_memory_at_each_call() -> None:
    compiled = neuron(lambda x: (x * 2, x.clone(), torch.zeros(3)))
    x = aligned(3)
    held = [compiled(x) for _ in range(4)]
    addresses = [t.data_ptr() for results in held for t in results] + [x.data_ptr()]
    assert len(set(addresses)) == len(addresses)


def test_seeds_are_drawn_only_where_needed(executors: list[Executor]) -> None:
    plain = neuron(lambda x: x * 2)
    random = neuron(lambda x: nn.functional.dropout(x, 0.5))
    x = aligned(3)
    state = torch.get_rng_state()
    plain(x)
    assert torch.equal(torch.get_rng_state(), state)
    random(x)
    assert not torch.equal(torch.get_rng_state(), state)
    assert [executor.signature.seeded for executor in executors] == [False, True]


def test_a_seed() -> None:
    torch.manual_seed(1)
    first, second = draw_seed(), draw_seed()
    assert first.shape == (2,) and first.dtype == torch.int64 and first[1] == 0
    assert first[0] != second[0]
    torch.manual_seed(1)
    assert torch.equal(draw_seed(), first)


def test_a_wrong_number_of_arguments_is_an_error(executors: list[Executor]) -> None:
    neuron(lambda x, y: x + y)(aligned(3), aligned(3))
    with pytest.raises(ValueError, match="zip"):
        executors[0]([aligned(3)])
