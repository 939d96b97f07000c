"""The `LLM` of commands that generate text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.llm import LLM
from pagedray.errors import StartupError

if TYPE_CHECKING:
    from cluster.engine.executor import ReportProgress
    from pagedray.config import EngineConfig

__all__ = ["TextLLM"]


class TextLLM(LLM):
    """An `LLM` whose model must generate text, which is checked before the model is loaded."""

    def _open(self, config: EngineConfig, report_progress: ReportProgress) -> None:
        task = config.model.task
        if task != "generate":
            raise StartupError(
                f"The task of {config.model.name} is {task}, but this command generates text; use "
                f"`pagedray serve`, or the method {task} of the class LLM."
            )
        super()._open(config, report_progress)
