"""Models and example arguments, before ``torch.export`` sees them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .errors import PackageError


def distinct(
    model: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call whose tensors have a memory of their own each, not that of the model's either.

    Of one tensor that is given twice, torch.export cannot tell what the model does with which.
    """
    owner = model if isinstance(model, torch.nn.Module) else getattr(model, "__self__", None)
    held = list(owner.state_dict().values()) if isinstance(owner, torch.nn.Module) else []
    known = {x.untyped_storage().data_ptr() for x in held if x.layout is torch.strided} - {0}

    def apart(value: torch.Tensor) -> torch.Tensor:
        if value.layout is not torch.strided or value.device.type != "cpu":
            return value
        place = value.untyped_storage().data_ptr()
        if place and place in known:
            copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
            return copy if any(step == 0 for step in value.stride()) else copy.copy_(value.detach())
        known.add(place)
        return value

    found: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(
        torch.Tensor, apart, (args, dict(kwargs))
    )
    return found


class _Function(torch.nn.Module):
    """A function, or a method of a module, in the form that torch.export takes."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        owner = getattr(function, "__self__", None)
        if isinstance(owner, torch.nn.Module):
            self.owner = owner
        self._function = function
        # torch.export binds arguments by the names of ``forward``.
        self.forward = function


def as_module(model: Callable[..., Any]) -> tuple[torch.nn.Module, str]:
    """A module, and what the names of its weights begin with that the user's do not."""
    if isinstance(model, torch.nn.Module):
        return model, ""
    return _Function(model), "owner."


def named_dims(
    leaves: Sequence[Any],
    model: Callable[..., Any],
    example: tuple[tuple[Any, ...], Mapping[str, Any]],
    dynamic_shapes: Any,
) -> dict[str, tuple[int, int]]:
    """Where a Dim stands in ``dynamic_shapes``: which of the ``leaves`` of a call, and its
    dimension.

    Raises:
        PackageError: for a form of ``dynamic_shapes`` in which this cannot be found.
    """
    args, kwargs = example
    function = model.forward if isinstance(model, torch.nn.Module) else model
    bound = inspect.signature(function).bind(*args, **kwargs).arguments
    if isinstance(dynamic_shapes, tuple | list):
        dynamic_shapes = dict(zip(bound, dynamic_shapes, strict=False))
    if not isinstance(dynamic_shapes, Mapping):
        raise PackageError("sizes need dynamic_shapes as a dict or a tuple")
    positions = {id(value): n for n, value in enumerate(leaves)}
    found: dict[str, tuple[int, int]] = {}

    def visit(value: Any, spec: Any) -> None:
        if isinstance(value, torch.Tensor):
            pairs = spec.items() if isinstance(spec, Mapping) else enumerate(spec or ())
            for dim, size in pairs:
                if isinstance(size, torch.export.Dim) and not hasattr(size, "root"):
                    found.setdefault(size.__name__, (positions[id(value)], dim))
        elif isinstance(value, Mapping) and isinstance(spec, Mapping):
            for key, item in value.items():
                visit(item, spec.get(key))
        elif isinstance(value, tuple | list) and isinstance(spec, tuple | list):
            for item, inner in zip(value, spec, strict=False):
                visit(item, inner)

    for name, value in bound.items():
        visit(value, dynamic_shapes.get(name))
    return found
