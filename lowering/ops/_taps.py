"""Weighted sums of a few elements along an axis: interpolation and adaptive pooling."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from ..lazy_jax import jnp


@dataclasses.dataclass(frozen=True)
class Taps:
    """``index``, ``weight`` ``[output, taps]``: what each output element along an axis adds up.

    ``real`` says which taps are no padding; ``None`` stands for all of them.
    """

    index: np.ndarray
    weight: np.ndarray
    real: np.ndarray | None = None

    def transposed(self, size: int) -> Taps:
        """The taps of the backward: which outputs each of ``size`` inputs had a part in."""
        rows, taps = np.nonzero(np.ones_like(self.index) if self.real is None else self.real)
        inputs = self.index[rows, taps]
        order = np.argsort(inputs, kind="stable")
        inputs, rows, weights = inputs[order], rows[order], self.weight[rows, taps][order]
        counts = np.bincount(inputs, minlength=size)
        place = np.arange(len(inputs)) - (np.cumsum(counts) - counts)[inputs]
        shape = size, max(int(counts.max(initial=0)), 1)
        index, weight = np.zeros(shape, np.int64), np.zeros(shape, self.weight.dtype)
        index[inputs, place], weight[inputs, place] = rows, weights
        return Taps(index, weight, np.arange(shape[1]) < counts[:, None])

    def apply(self, x: Any, axis: int) -> Any:
        """The weighted sums along ``axis``; tap by tap they fuse, which a reduction does not."""
        if self.weight.shape[1] == 1 and self.real is None and (self.weight == 1).all():
            return self._taken(x, axis, 0)
        total: Any = 0
        for tap in range(self.weight.shape[1]):
            term = self._taken(x, axis, tap) * self._along(self.weight[:, tap], x, axis, x.dtype)
            # Padding is left out, not weighted with zero: it may read what is not finite.
            if self.real is not None and not self.real[:, tap].all():
                term = jnp.where(self._along(self.real[:, tap], x, axis, bool), term, 0)
            total = total + term
        return total

    def apply_uint8(self, x: Any, axis: int) -> Any:
        """The same for ``uint8`` images: 16-bit fixed-point weights, and a rounded result."""
        largest, bits = self.weight.max(), 0
        while bits < 22 and int(0.5 + largest * (1 << (bits + 1))) < 1 << 15:
            bits += 1
        fixed = np.trunc(self.weight * (1 << bits) + np.copysign(0.5, self.weight))
        total: Any = 1 << (bits - 1)
        for tap in range(fixed.shape[1]):
            term = self._taken(x, axis, tap).astype(jnp.int32)
            total = total + term * self._along(fixed[:, tap], x, axis, jnp.int32)
        return jnp.clip(total >> bits, 0, 255).astype(jnp.uint8)

    def _taken(self, x: Any, axis: int, tap: int) -> Any:
        place = (*(slice(None),) * axis, jnp.asarray(self.index[:, tap], jnp.int32))
        return x.at[place].get(mode="promise_in_bounds")

    def _along(self, values: np.ndarray, x: Any, axis: int, dtype: Any) -> Any:
        return jnp.asarray(values, dtype).reshape(-1, *(1,) * (x.ndim - axis - 1))
