"""The requests that ended because they killed their ranks, which clients may send again.

It has no clock: times are arguments.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from pagedray.errors import LethalRequestError, OverloadedError

if TYPE_CHECKING:
    from collections.abc import Hashable

__all__ = ["LethalRequests"]

_WINDOW_S = 600.0
_MAX_OF_TENANT = 3
"""Lethal requests of a tenant within the window after which it waits."""
_MAX_KEPT = 256


class _Lethal(NamedTuple):
    """A request that killed its ranks."""

    noted_s: float
    tenant: str


class LethalRequests:
    """Rejects equal requests, and tenants that send many, for ten minutes.

    Requests without a key belong to one tenant, which is never rejected as a whole.
    """

    def __init__(self) -> None:
        self._lethal: OrderedDict[Hashable, _Lethal] = OrderedDict()

    def __bool__(self) -> bool:
        """Return whether there is anything to check."""
        return bool(self._lethal)

    def note_request(self, content: Hashable, tenant: str, now_s: float) -> None:
        """Note a request that killed its ranks; equal requests have equal `content`."""
        self._lethal[content] = _Lethal(now_s, tenant)
        self._lethal.move_to_end(content)
        if len(self._lethal) > _MAX_KEPT:
            self._lethal.popitem(last=False)

    def check(self, content: Hashable, tenant: str, now_s: float) -> None:
        """Raise LethalRequestError for an equal request, and OverloadedError for its tenant."""
        while self._lethal and next(iter(self._lethal.values())).noted_s < now_s - _WINDOW_S:
            self._lethal.popitem(last=False)
        if content in self._lethal:
            raise LethalRequestError
        times = [one.noted_s for one in self._lethal.values() if one.tenant == tenant]
        if tenant and len(times) >= _MAX_OF_TENANT:
            raise OverloadedError(
                f"{len(times)} requests of this tenant ended the processes that ran them. Its "
                "requests are accepted again later.",
                retry_after_s=times[-_MAX_OF_TENANT] + _WINDOW_S - now_s,
            )
