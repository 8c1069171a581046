"""PyTorch's own operator and module databases run through ``backend="neuron"``."""
