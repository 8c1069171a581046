"""Operators: every value, dtype, shape and stride against eager PyTorch."""
