"""The keys of three tenants: one has limits, one a weight, and one is an admin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.serving.auth import Authenticator, digest_of

if TYPE_CHECKING:
    from pathlib import Path


def limited_tenants(tmp_path: Path) -> Authenticator:
    """Return the keys of ann, who has limits, ben, who has a weight, and root, an admin."""

    def entry(name: str, more: str = "") -> str:
        return f'[tenants.{name}]\nkeys = ["sha256:{digest_of(name).hex()}"]\n{more}\n'

    path = tmp_path / "keys.toml"
    limits = "max_requests = 2\nmax_tokens = 100"
    path.write_text(
        entry("ann", limits) + entry("ben", "weight = 3") + entry("root", "is_admin = true")
    )
    path.chmod(0o600)
    return Authenticator(path)
