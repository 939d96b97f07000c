"""The chat templates of requests, compiled."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from cluster.serving.text.templates.chat_template import ChatTemplate
from pagedray.errors import CheckpointError, InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["RequestTemplates"]

_PARAM = "chat_template"
_MAX_LENGTH = 2**15
"""Characters of a template: those of models have up to 20 000."""
_NUM_KEPT = 32


class RequestTemplates:
    """Compiles templates, and keeps those used last; thread-safe."""

    def __init__(self, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = special_tokens
        self._kept: OrderedDict[tuple[str, str], ChatTemplate] = OrderedDict()
        self._lock = threading.Lock()

    def compiled(self, source: str, tenant: str) -> ChatTemplate:
        """Return the template of a source, which takes long for the first request of a tenant.

        Raises InvalidRequestError.
        """
        if len(source) > _MAX_LENGTH:
            raise InvalidRequestError(
                f"{_PARAM} may have at most {_MAX_LENGTH} characters, not {len(source)}.",
                param=_PARAM,
            )
        # A tenant must not learn from the time whether another one has used a template.
        key = (tenant, source)
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found
        try:
            template = ChatTemplate(
                source, self._special_tokens, origin="The request", owner="request"
            )
        except CheckpointError as error:
            raise InvalidRequestError(str(error), param=_PARAM) from error
        with self._lock:
            self._kept[key] = template
            if len(self._kept) > _NUM_KEPT:
                self._kept.popitem(last=False)
        return template
