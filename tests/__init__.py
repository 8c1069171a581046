"""The tests run with the checks of indices on, which are off by default (docs/decisions.md)."""

import os

os.environ.setdefault("NEURON_COMPILE_CHECK_INDICES", "1")
