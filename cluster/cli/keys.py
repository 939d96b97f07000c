"""`pagedray keys new`: creates an API key and its entry for the key file."""

from __future__ import annotations

from cluster.serving.auth.key_file import check_tenant_name, digest_of, new_key

__all__ = ["print_new_key"]


def print_new_key(tenant: str) -> int:
    """Print a new key and its entry for a key file. Raises StartupError for an invalid name."""
    check_tenant_name(tenant)
    key = new_key()
    print(f"API key for {tenant}; it is not shown again:\n\n    {key}\n")
    print("Add this to the file given to --api-keys:\n")
    print(f'[tenants."{tenant}"]\nkeys = ["sha256:{digest_of(key).hex()}"]')
    return 0
