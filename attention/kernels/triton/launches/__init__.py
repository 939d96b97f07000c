"""Launches that overlap or take little time of the host, and the keys of compiled kernels."""
