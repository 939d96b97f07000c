"""Parameters that clients send and that are ignored, because they cannot change the answer."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pagedray.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["IgnoredParameters"]

logger = logging.getLogger(__name__)


class IgnoredParameters:
    """Counts ignored parameters, and logs each name once; or rejects them."""

    def __init__(self, count: Callable[[str], None], *, is_strict: bool) -> None:
        """`count` is called with each name; the names come from tables in the code."""
        self._count = count
        self._is_strict = is_strict
        self._logged: set[str] = set()

    def note(self, name: str) -> None:
        """Note a parameter that is ignored. Raises InvalidRequestError in strict mode."""
        if self._is_strict:
            raise InvalidRequestError(
                f"{name} has no effect on this server, and --strict-parameters rejects such "
                "parameters.",
                param=name,
            )
        self._count(name)
        if name not in self._logged:
            self._logged.add(name)
            logger.info("Ignoring the parameter %s, which has no effect on this server.", name)
