"""A key file with tenants, for servers with authentication."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.serving.auth import digest_of, new_key

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["write_keys"]


def write_keys(path: Path, *names: str) -> dict[str, str]:
    """Write a file with a key for each tenant, and return the keys."""
    keys = {name: new_key() for name in names}
    entries = (
        f'[tenants.{name}]\nkeys = ["sha256:{digest_of(key).hex()}"]\n'
        for name, key in keys.items()
    )
    path.touch(0o600)
    path.write_text("\n".join(entries))
    return keys
