"""A kernel that others replace if it does not compile."""

from __future__ import annotations

import logging
from typing import Any

__all__ = ["OptionalKernel"]

logger = logging.getLogger(__name__)


class OptionalKernel:
    """Launches a kernel until it fails to compile, for example with another release of Triton.

    It may fail on some ranks of a group only, so the replacement must return the same results.
    """

    def __init__(self, kernel: Any, *, replacement: str) -> None:  # Any: Triton has no types
        """`replacement` describes in the log what computes the same."""
        self._kernel = kernel
        self._replacement = replacement
        self._has_failed = False

    # Any: as above
    def launch(self, grid: tuple[int, ...], *arguments: Any, **options: Any) -> bool:
        """Launch the kernel; return False, and launch nothing, if it has failed to compile."""
        if self._has_failed:
            return False
        try:
            self._kernel[grid](*arguments, **options)
        # Compilers raise errors of many types. If the device has failed, the replacement raises.
        except Exception as error:
            self._has_failed = True
            logger.warning(
                "The kernel %s does not compile, so %s takes its place, which is slower: %s",
                self._kernel.__name__.strip("_"),
                self._replacement,
                next(iter(str(error).splitlines()), type(error).__name__),
            )
        return not self._has_failed
