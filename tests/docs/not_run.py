"""The blocks of code that tests do not run, and why."""

from collections.abc import Mapping
from fnmatch import fnmatchcase

from tests.docs.command_checks import Block

_CLUSTER = "needs a Kubernetes cluster"
_GPU = "needs a GPU"
_INSTALLS = "installs packages"
_MINUTES = "takes minutes, and most benchmarks need a GPU"

NOT_RUN: Mapping[str, str] = {
    "CONTRIBUTING.md: make setup*": "runs the tests",
    "README.md: make demo*": "makes an environment",
    "README.md: pip install *": _INSTALLS,
    "docs/*: *python *bench*": _MINUTES,
    "docs/benchmarks.md: pagedray bench *": _GPU,
    "docs/keys.md: chmod *": "listens on all interfaces",
    "docs/kubernetes.md: docker *": "needs a container runtime and a registry",
    "docs/kubernetes.md: grpcurl *": "grpcurl is in no package index that we install from",
    "docs/kubernetes.md: helm *": _CLUSTER,
    "docs/kubernetes.md: kubectl *": _CLUSTER,
    "docs/kubernetes.md: pip install checkov": _INSTALLS,
    "docs/observability.md: handle = *": "a part of a program, which needs an application",
    "docs/observability.md: pip install *": _INSTALLS,
    "docs/observability.md: pagedray top  *": "runs until a key is pressed",
    "docs/quickstart.md: python3 -m venv*": _INSTALLS,
    "docs/ray-serve.md: handle = *": "a part of a program, which needs an application",
    "docs/ray-serve.md: serve run *": _GPU,
    "docs/reliability.md: python -m tests.chaos *": "takes minutes",
}
"""Reasons by patterns of a block's document and first line."""

SLOW: Mapping[str, str] = {
    "docs/load-tests.md: pagedray bench latency *": "takes six seconds",
    "docs/load-tests.md: pagedray bench serve *": "takes ten seconds",
    "README.md: pagedray serve *": "starts Ray",
    "docs/quickstart.md: pagedray serve *": "starts Ray",
    "docs/load-tests.md: pagedray serve *": "starts Ray",
    "docs/simulation.md: pagedray simulate --num-prompts *": "simulates thousands of requests",
}
"""Blocks that only `make test-slow` runs, in the same form."""


def is_run(block: Block) -> bool:
    """Return whether tests run a block."""
    return not _is_named(block, NOT_RUN)


def is_slow(block: Block) -> bool:
    """Return whether only `make test-slow` runs a block."""
    return _is_named(block, SLOW)


def _is_named(block: Block, patterns: Mapping[str, str]) -> bool:
    return any(fnmatchcase(block.key, pattern) for pattern in patterns)
