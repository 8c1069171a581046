"""Errors and warnings that users see."""

from __future__ import annotations


class NeuronError(Exception):
    """Base of this package's errors."""


class SettingsError(NeuronError, ValueError):
    """An option, mode or environment variable is unknown or has a wrong value."""


class UnsupportedError(NeuronError):
    """Something cannot run on the device and ``fullgraph_on_device`` forbids the fallback."""


class FallbackWarning(UserWarning):
    """An operator runs in eager PyTorch between compiled partitions; given once an operator."""


class PackageError(NeuronError):
    """A file is no package, is damaged, of another version, or lacks what a caller asks for."""


class InputError(NeuronError, ValueError):
    """Arguments of a package's entry point are none that it was exported for."""
