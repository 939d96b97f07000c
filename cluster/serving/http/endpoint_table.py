"""Finds the endpoint of a path, or the one that a client most likely means."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.serving.http.errors import OPENAI_ERRORS
from pagedray.wording.nearest_name import nearest_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cluster.serving.http.endpoint import Endpoint
    from cluster.serving.http.errors import ErrorFormat

__all__ = ["EndpointTable"]

_LONGEST_LIKE = 64
"""Characters of a path that is compared with all others, which takes time."""
_VERSION = "/v1"

_ABSENT = frozenset(("/v1/responses/compact",))
"""Paths of OpenAI's API that do not exist here, although the parameter of others matches them."""


class EndpointTable:
    """Finds endpoints by the exact path of a request, without normalization.

    HEAD is answered where GET is, unless the path has a parameter: a stream would be resumed.
    """

    def __init__(self, endpoints: tuple[Endpoint, ...]) -> None:
        self._exact: dict[str, dict[str, Endpoint]] = {}
        self._open: dict[tuple[str, str], dict[str, Endpoint]] = {}
        """Endpoints whose paths have a parameter, by what precedes it and what follows it."""
        for endpoint in endpoints:
            prefix, brace, rest = endpoint.path.partition("{")
            if brace:
                ends = prefix, rest.partition("}")[2]
                self._open.setdefault(ends, {})[endpoint.method] = endpoint
            else:
                methods = self._exact.setdefault(prefix, {})
                methods[endpoint.method] = endpoint
                if endpoint.method == "GET":
                    # The server leaves the body out.
                    methods["HEAD"] = endpoint
        self._errors_below = {
            f"{one.path}/": one.errors for one in endpoints if one.errors is not OPENAI_ERRORS
        }
        # A path with an end is more specific than one whose parameter is all of the rest.
        self._open = dict(sorted(self._open.items(), key=lambda one: -len(one[0][1])))

    def find(self, path: str) -> tuple[Mapping[str, Endpoint], str]:
        """Return the endpoints of a path by method, and the value of its parameter."""
        found = self._exact.get(path)
        if found is not None:
            return found, ""
        if path in _ABSENT:
            return {}, ""
        for (prefix, suffix), by_method in self._open.items():
            is_longer = len(path) > len(prefix) + len(suffix)
            if is_longer and path.startswith(prefix) and path.endswith(suffix):
                return by_method, path[len(prefix) : len(path) - len(suffix)]
        return {}, ""

    def errors_of(self, path: str) -> ErrorFormat:
        """Return the format of errors of the API that a path belongs to."""
        methods, _ = self.find(path)
        of_path = (one.errors for one in methods.values())
        below = (form for root, form in self._errors_below.items() if path.startswith(root))
        return next(of_path, None) or next(below, OPENAI_ERRORS)

    def near(self, path: str) -> str | None:
        """Return the path of an endpoint that a client most likely means; None is none.

        The URL that a client is given may lack the version, or have it twice, or be misspelled.
        """
        bare = path.removeprefix(_VERSION).rstrip("/")
        for one in (_VERSION + bare, bare):
            if one in self._exact:
                return one
        return nearest_name(path, self._exact) if len(path) <= _LONGEST_LIKE else None
