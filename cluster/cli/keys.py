"""`pagedray keys new`: makes an API key and the lines that let it in."""

from __future__ import annotations

from cluster.serving.auth.key_file import check_tenant_name, digest_of, new_key

__all__ = ["print_new_key"]


def print_new_key(tenant: str) -> int:
    """Print a key, once, and what a key file says of it. Raises StartupError for a bad name."""
    check_tenant_name(tenant)
    key = new_key()
    print(f"Key of {tenant}, which is shown only this once:\n\n    {key}\n")
    print("Lines for the file that --api-keys names:\n")
    print(f'[tenants."{tenant}"]\nkeys = ["sha256:{digest_of(key).hex()}"]')
    return 0
