"""RNN, GRU and LSTM: cells, whole sequences, both directions, and gradients.

Dynamo leaves whole-sequence modules to eager unless ``allow_rnn`` is set.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from .compare import check

SEQUENCES = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "rnn": torch.nn.RNN}
CELLS = {"lstm": torch.nn.LSTMCell, "gru": torch.nn.GRUCell, "rnn": torch.nn.RNNCell}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"num_layers": 2, "bidirectional": True},
    {"bias": False, "batch_first": True},
]


def compare(module: torch.nn.Module, *inputs: Any) -> None:
    """The gradients of inputs and parameters, too."""
    names, parameters = zip(*module.named_parameters(), strict=True)

    def function(parameters: Any, *inputs: Any) -> Any:
        values = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(module, values, inputs)

    check(function, parameters, *inputs, grad=True, scale=4)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("kind", SEQUENCES)
@torch._dynamo.config.patch(allow_rnn=True)
def test_sequences(kind: str, settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module = SEQUENCES[kind](4, 3, **settings)
    x = torch.randn(5, 2, 4, requires_grad=True)
    compare(module, x)
    with torch.no_grad():
        check(module, x.detach())


@pytest.mark.parametrize("reverse", [False, True])
@torch._dynamo.config.patch(allow_rnn=True)
def test_states_of_a_layer(reverse: bool) -> None:
    torch.manual_seed(0)
    module = torch.nn.LSTM(4, 3)
    x, h, c = torch.randn(6, 2, 4), torch.randn(1, 2, 3), torch.randn(1, 2, 3)
    compare(module, x.requires_grad_(), (h.requires_grad_(), c.requires_grad_()))
    weights = [parameter.detach() for parameter in module.parameters()]
    check(
        lambda x, h, c: torch.ops.aten.mkldnn_rnn_layer.default(
            x, *weights, h, c, reverse, [], 2, 3, 1, True, False, False, False
        )[:3],
        x.detach(),
        h.detach(),
        c.detach(),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", CELLS)
def test_cells(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4, dtype=dtype, requires_grad=True)
    compare(CELLS[kind](4, 3, dtype=dtype), x)
