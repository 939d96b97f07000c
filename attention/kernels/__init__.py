"""Kernels of our own, for what no library does or does slowly."""
