"""The body of POST /v1/messages/count_tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.serving.anthropic.conversation_body import ConversationBody
from cluster.serving.inputs import TokenizeInput

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.serving.anthropic.model_support import ModelSupport
    from cluster.serving.tools.tool_choice import ToolUse

__all__ = ["CountBody"]


class CountBody(ConversationBody):
    """A conversation whose tokens are counted."""

    def to_input(
        self, tools: ToolUse, support: ModelSupport, *, note_ignored: Callable[[str], None]
    ) -> TokenizeInput:
        """Return the input of the call. Raises InvalidRequestError."""
        prompt = self.prompt(tools, support, note_ignored=note_ignored)
        return TokenizeInput(prompt=prompt, model=self.model)
