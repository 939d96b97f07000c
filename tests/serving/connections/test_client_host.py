"""Clients with many addresses count as one host."""

from __future__ import annotations

import pytest

from cluster.serving.connections.client_host import client_host


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2::7", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::1", "2001:db8:1:2::/64"),
        ("2001:db8:1:3::7", "2001:db8:1:3::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("/run/pagedray.sock", "/run/pagedray.sock"),
    ],
)
def test_addresses_of_one_client_are_one_host(address: str, host: str) -> None:
    assert client_host(address) == host
