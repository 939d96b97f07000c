"""Limits on the time that one rendering of a template takes, and on the size of its values."""

from __future__ import annotations

import threading
import time

from jinja2 import TemplateError

__all__ = ["MAX_CPU_S", "MAX_TOTAL", "RenderingBudget", "TemplateLimitError"]

MAX_CPU_S = 2.0
"""CPU time of one rendering."""
MAX_TOTAL = 2**27
"""Characters of all texts, and elements of all lists, that one rendering creates."""
_MAX_CONSTANTS = 2**18
"""The limit on values that the compiler computes in advance and keeps in memory."""
_CHECK_INTERVAL = 64
"""Steps between two readings of the clock, each of which takes as long as a step."""


class TemplateLimitError(TemplateError):
    """A template takes too long, or creates a value that is too large."""


class RenderingBudget(threading.local):
    """Amounts that the rendering on the current thread has used; each thread has its own."""

    def __init__(self, cpu_s: float) -> None:
        self._cpu_s = cpu_s
        self.start_rendering()

    def start_rendering(self) -> None:
        """Count from zero on this thread."""
        self._start(MAX_TOTAL)

    def start_compiling(self) -> None:
        """Count from zero the values computed on this thread while a template is compiled."""
        self._start(_MAX_CONSTANTS)

    def _start(self, max_size: int) -> None:
        self._num_steps = self._size = 0
        self._max_size = max_size
        self._end_s = time.thread_time() + self._cpu_s

    def count_steps(self, num_steps: int = 1) -> None:
        """Count steps of a template. Raises TemplateLimitError if they took too long."""
        before = self._num_steps
        self._num_steps = after = before + num_steps
        if before // _CHECK_INTERVAL == after // _CHECK_INTERVAL:
            return
        now_s = time.thread_time()
        if now_s > self._end_s:
            raise TemplateLimitError(f"the template takes more than {self._cpu_s:g} s of CPU time")

    def count_size(self, size: int) -> None:
        """Count characters or elements. Raises TemplateLimitError if there are too many."""
        self._size += size
        if self._size > self._max_size:
            raise TemplateLimitError("the template generates too much text")
