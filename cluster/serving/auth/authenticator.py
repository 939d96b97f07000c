"""Authentication of calls by the API key in their Authorization header."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from cluster.serving.auth.key_file import KeyFile, digest_of
from cluster.serving.auth.tenant import ANONYMOUS, Tenant
from pagedray.errors import AuthenticationError, StartupError
from pagedray.text import pluralize

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["Authenticator"]

logger = logging.getLogger(__name__)

_SCHEME = "bearer "
_MAX_LENGTH = 512


class Authenticator:
    """The keys of one file, or some keys; without any every call is of the tenant ANONYMOUS."""

    def __init__(self, path: Path | None = None, *, keys: Sequence[str] = ()) -> None:
        """`keys` are the keys of a tenant, an admin, if there is no file.

        Raises StartupError if the file is missing or invalid, or if a key is.
        """
        if path is not None and keys:
            raise StartupError("--api-key and --api-keys cannot be used together.")
        self._path = path
        self._stamp = _stamp(path)
        self._keys = None if path is None else KeyFile.from_file(path)
        if keys:
            self._keys = KeyFile.of_one_tenant(keys)

    @property
    def requires_keys(self) -> bool:
        """Whether calls without a key are rejected."""
        return self._keys is not None

    def authenticate(self, authorization: str | None) -> Tenant:
        """Return the tenant of an Authorization header's key. Raises AuthenticationError."""
        if self._keys is None:
            return ANONYMOUS
        if authorization is None:
            raise AuthenticationError("Missing API key; send it as `Authorization: Bearer KEY`.")
        if len(authorization) > _MAX_LENGTH or not authorization[:7].lower() == _SCHEME:
            raise AuthenticationError("Invalid Authorization header; it must be `Bearer KEY`.")
        digest = digest_of(authorization[7:].strip())
        # The time of the lookup may reveal digests, which do not reveal keys.
        name = self._keys.names.get(digest)
        if name is not None:
            return self._keys.tenants[name]
        raise AuthenticationError("Invalid API key.")

    def tenant_named(self, name: str) -> Tenant:
        """Return a tenant by name. Raises AuthenticationError if it has been removed."""
        if self._keys is None:
            return ANONYMOUS if name == ANONYMOUS.name else Tenant(name=name)
        tenant = self._keys.tenants.get(name)
        if tenant is None:
            raise AuthenticationError("The tenant of the API key no longer exists.")
        return tenant

    def reload(self) -> None:
        """Reload the file; if it is invalid, log the error and keep the current keys."""
        if self._path is None:
            return
        self._stamp = _stamp(self._path)
        try:
            self._keys = KeyFile.from_file(self._path)
        except StartupError as error:
            logger.error("Keeping the current API keys: %s", error)
            return
        logger.info("Reloaded %s with %s.", self._path, pluralize(len(self._keys.names), "API key"))

    def reload_if_changed(self) -> None:
        """Reload the file if it has changed."""
        if _stamp(self._path) != self._stamp:
            self.reload()


def _stamp(path: Path | None) -> tuple[int, int, int] | None:
    """Return a value that changes when the file is written or replaced; None without a file."""
    if path is None:
        return None
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
