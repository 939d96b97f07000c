"""The ids of responses, which name the replica that keeps them."""

from __future__ import annotations

import re

__all__ = ["id_of_response", "replica_of"]

_ID = re.compile(r"resp_(?P<replica>[A-Za-z0-9]{1,32})_[0-9a-f]{32}")


def id_of_response(number: str, replica: str | None = None) -> str:
    """Return an id; `number` is unique, and `replica` keeps the response if there are several."""
    return f"resp_{number}" if replica is None else f"resp_{replica}_{number}"


def replica_of(given: str) -> str | None:
    """Return the name of the replica that keeps a response; None if its id has none."""
    found = _ID.fullmatch(given)
    return None if found is None else found["replica"]
