"""Kernels for what libraries do not support or do slowly."""
