"""How calls are read and limited, in any protocol."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.serving.buffers import ReaderLimits
from cluster.serving.intake import IntakeLimits
from cluster.serving.reasoning import ReasoningFormat
from cluster.serving.tools.tool_calls import ToolCallFormat

__all__ = ["CallOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """The options of a servicer."""

    tool_format: ToolCallFormat | None = None
    """How the model writes tool calls; None is detected in its chat template."""
    reasoning_format: ReasoningFormat | None = None
    """How the model marks its reasoning; None is detected in its chat template."""
    reader_limits: ReaderLimits = field(default_factory=ReaderLimits)
    intake_limits: IntakeLimits = field(default_factory=IntakeLimits)
    strict_parameters: bool = False
    """Whether parameters that would be ignored are rejected."""
