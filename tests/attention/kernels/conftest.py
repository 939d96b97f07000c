"""Settings of the tests of kernels: Triton runs them on the CPU where there is no GPU."""

import importlib.util

# Asterisks match slashes too, so this holds for folders below.
collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["*test_triton_*.py"]
