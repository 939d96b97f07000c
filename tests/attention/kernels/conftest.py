"""Settings of the tests of kernels: Triton runs them on the CPU where there is no GPU."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_triton_*.py"]
