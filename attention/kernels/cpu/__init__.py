"""Kernels in C for CPUs, each with a Python module of its name that loads and calls it."""

__all__: list[str] = []
