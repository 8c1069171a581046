"""Fourier transforms: forward and back, real and complex, all norms."""

from __future__ import annotations

import pytest
import torch

from .compare import check


@pytest.mark.parametrize("norm", ["backward", "ortho", "forward"])
def test_transforms(norm: str) -> None:
    torch.manual_seed(0)
    real, odd = torch.randn(3, 4, 8), torch.randn(2, 7)
    fft = torch.fft
    check(
        lambda x, y: (
            torch.view_as_real(fft.rfft(x, norm=norm)),
            torch.view_as_real(fft.rfft2(x, norm=norm)),
            torch.view_as_real(fft.rfftn(x, dim=(0, 2), norm=norm)),
            torch.view_as_real(fft.rfft(y, norm=norm)),
            fft.irfft(fft.rfft(x, norm=norm), norm=norm),
            fft.irfft(fft.rfft(y, norm=norm), n=7, norm=norm),
            fft.irfft2(fft.rfft2(x, norm=norm), norm=norm),
            torch.view_as_real(fft.fft(y, norm=norm)),
        ),
        real,
        odd,
    )
    z = torch.randn(3, 4, 5, dtype=torch.complex64)
    check(
        lambda z: (
            fft.fft(z, norm=norm),
            fft.ifft(z, dim=1, norm=norm),
            fft.fft2(z, norm=norm),
            fft.ifftn(z, norm=norm),
            fft.fftshift(z),
        ),
        z,
    )


def test_convolution_by_fft() -> None:
    torch.manual_seed(0)
    x, kernel = torch.randn(2, 16), torch.randn(16)

    def convolve(x: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(kernel), n=16)

    check(convolve, x, kernel)
