"""Who makes a call: the key in its Authorization header says it, or nobody is asked."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from cluster.serving.auth.key_file import KeyFile, digest_of
from cluster.serving.auth.tenant import ANONYMOUS, Tenant
from pagedray.errors import AuthenticationError, StartupError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Authenticator"]

logger = logging.getLogger(__name__)

_SCHEME = "bearer "
_MAX_LENGTH = 512


class Authenticator:
    """Knows the keys of one file; without a file everybody is ANONYMOUS."""

    def __init__(self, path: Path | None = None) -> None:
        """Raises StartupError if the file is missing or broken."""
        self._path = path
        self._stamp = _stamp(path)
        self._keys = None if path is None else KeyFile.from_file(path)

    @property
    def requires_keys(self) -> bool:
        """Whether a call without a key is refused."""
        return self._keys is not None

    def authenticate(self, authorization: str | None) -> Tenant:
        """Return whose key an Authorization header holds. Raises AuthenticationError."""
        if self._keys is None:
            return ANONYMOUS
        if authorization is None:
            raise AuthenticationError(
                "The call has no key; send it as `Authorization: Bearer KEY`."
            )
        if len(authorization) > _MAX_LENGTH or not authorization[:7].lower() == _SCHEME:
            raise AuthenticationError("The authorization must be `Bearer KEY`.")
        digest = digest_of(authorization[7:].strip())
        # How long a look into the table takes may tell of digests, from which no key follows.
        name = self._keys.names.get(digest)
        if name is not None:
            return self._keys.tenants[name]
        raise AuthenticationError("Nobody has this key.")

    def tenant_named(self, name: str) -> Tenant:
        """Return the tenant of a call that was let in. Raises AuthenticationError if it is gone."""
        if self._keys is None:
            return ANONYMOUS if name == ANONYMOUS.name else Tenant(name=name)
        tenant = self._keys.tenants.get(name)
        if tenant is None:
            raise AuthenticationError("The call has no tenant that is known here.")
        return tenant

    def reload(self) -> None:
        """Read the file again; if it is broken, log why and keep what was known."""
        if self._path is None:
            return
        self._stamp = _stamp(self._path)
        try:
            self._keys = KeyFile.from_file(self._path)
        except StartupError as error:
            logger.error("The keys stay as they were: %s", error)
            return
        logger.info("%s was read again; it has %d keys.", self._path, len(self._keys.names))

    def reload_if_changed(self) -> None:
        """Read the file again if it is not the one that was read."""
        if _stamp(self._path) != self._stamp:
            self.reload()


def _stamp(path: Path | None) -> tuple[int, int, int] | None:
    """Return what changes when a file is written or replaced; None if there is no file."""
    if path is None:
        return None
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
