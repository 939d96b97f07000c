"""API keys: the key file with its tenants, and the authentication of calls.

A key is 32 random bytes, so one SHA-256 of it is as safe as a slow hash. Keys cannot be recovered
from the file.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
import stat
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from pagedray.errors import AuthenticationError, StartupError
from pagedray.text import pluralize

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = [
    "ANONYMOUS",
    "Authenticator",
    "KeyFile",
    "Tenant",
    "check_tenant_name",
    "digest_of",
    "new_key",
]

logger = logging.getLogger(__name__)

_PREFIX = "pr-"
_NUM_KEY_BYTES = 32
_MAX_FILE_BYTES = 2**20
_MAX_WEIGHT = 1000.0
_MAX_KEY_LENGTH = 256
_ONLY_TENANT = "default"
_TENANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")

_SCHEME = "bearer "
_MAX_LENGTH = 512


class _TenantEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table `[tenants.NAME]` of the file."""

    keys: tuple[str, ...] = ()
    weight: float = 1.0
    max_requests: int | None = None
    max_tokens: int | None = None
    is_admin: bool = False


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a key file."""

    tenants: dict[str, _TenantEntry]


class KeyFile:
    """The tenants of one file, by name and by key."""

    def __init__(self, tenants: Mapping[str, Tenant], names: Mapping[bytes, str]) -> None:
        self.tenants = dict(tenants)
        """Tenants by name."""
        self.names = dict(names)
        """Names of tenants by the digests of their keys."""

    @classmethod
    def of_one_tenant(cls, keys: Sequence[str]) -> KeyFile:
        """Return the keys of one tenant, an admin. Raises StartupError for an invalid key."""
        for key in keys:
            if not (8 <= len(key) <= _MAX_KEY_LENGTH and key.isascii() and key.isprintable()):
                raise StartupError(
                    f"--api-key must be 8 to {_MAX_KEY_LENGTH} printable ASCII characters."
                )
        tenant = Tenant(name=_ONLY_TENANT, is_admin=True)
        return cls({tenant.name: tenant}, dict.fromkeys(map(digest_of, keys), tenant.name))

    @classmethod
    def from_file(cls, path: Path) -> KeyFile:
        """Return the parsed file. Raises StartupError that names the file and the error."""
        try:
            with path.open("rb") as file:
                mode = stat.S_IMODE(path.stat().st_mode)
                content = file.read(_MAX_FILE_BYTES + 1)
        except OSError as error:
            raise StartupError(f"Cannot read key file {path}: {error.strerror}.") from error
        if len(content) > _MAX_FILE_BYTES:
            raise StartupError(f"Key file {path} is larger than {_MAX_FILE_BYTES} bytes.")
        if mode & stat.S_IROTH:
            logger.warning("Key file %s is readable by all users; run chmod o-r on it.", path)
        try:
            entries = msgspec.convert(tomllib.loads(content.decode()), _File).tenants
        except (ValueError, msgspec.ValidationError, RecursionError) as error:
            raise StartupError(f"Invalid key file {path}: {_one_line(error)}.") from error
        return cls(*_read_entries(path, entries))


def new_key() -> str:
    """Return a new random key."""
    return _PREFIX + secrets.token_urlsafe(_NUM_KEY_BYTES)


def check_tenant_name(name: str) -> None:
    """Raise StartupError for an invalid name."""
    if not _TENANT_NAME.fullmatch(name):
        raise StartupError(
            f"the tenant name {name!r:.80} must be 1 to 64 letters, digits, dots, underscores and "
            "hyphens, and begin with a letter or digit."
        )


def digest_of(key: str) -> bytes:
    """Return the digest of a key, as key files hold it."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _read_entries(
    path: Path, entries: Mapping[str, _TenantEntry]
) -> tuple[dict[str, Tenant], dict[bytes, str]]:
    tenants: dict[str, Tenant] = {}
    names: dict[bytes, str] = {}
    for name, entry in entries.items():
        _check_entry(path, name, entry)
        tenants[name] = Tenant(
            name=name,
            weight=entry.weight,
            max_requests=entry.max_requests,
            max_tokens=entry.max_tokens,
            is_admin=entry.is_admin,
        )
        for number, key in enumerate(entry.keys, start=1):
            found = _DIGEST.fullmatch(key)
            if found is None:
                raise StartupError(
                    f"{path}: key {number} of tenant {name} must be sha256: and 64 hexadecimal "
                    "digits, as `pagedray keys new` prints it."
                )
            if names.setdefault(bytes.fromhex(found[1]), name) != name:
                raise StartupError(
                    f"{path}: key {number} of tenant {name} belongs to another tenant too."
                )
    if not names:
        raise StartupError(f"Key file {path} has no keys; add one with `pagedray keys new`.")
    return tenants, names


def _check_entry(path: Path, name: str, entry: _TenantEntry) -> None:
    try:
        check_tenant_name(name)
    except StartupError as error:
        raise StartupError(f"{path}: {error}") from error
    if not 0.0 < entry.weight <= _MAX_WEIGHT:
        raise StartupError(
            f"{path}: weight of tenant {name} must be greater than 0 and at most {_MAX_WEIGHT:g}, "
            f"not {entry.weight:g}."
        )
    for field in ("max_requests", "max_tokens"):
        limit = getattr(entry, field)
        if limit is not None and limit < 1:
            raise StartupError(f"{path}: {field} of tenant {name} must be at least 1, not {limit}.")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200].rstrip(".")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A tenant; a limit of None means that there is none."""

    name: str
    """Prefixes and request ids are separate for each name."""
    weight: float = 1.0
    """The tenant's share of steps, relative to other tenants with waiting requests."""
    max_requests: int | None = None
    """Maximum number of open calls."""
    max_tokens: int | None = None
    """Limit of prompt tokens and tokens to generate of all open calls."""
    is_admin: bool = False
    """Whether it may see the data of all tenants."""


ANONYMOUS = Tenant(name="", is_admin=True)
"""The tenant of every call if no keys are required."""


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
