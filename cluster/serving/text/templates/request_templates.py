"""The chat templates of requests, compiled."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections import OrderedDict
from typing import TYPE_CHECKING

from cluster.serving.text.templates.chat_template import ChatTemplate
from cluster.serving.text.templates.compiler_client import TemplateCompilerClient
from cluster.serving.text.templates.rendering_budget import MAX_CPU_S
from cluster.serving.text.templates.template_code import InvalidTemplateError, compile_template
from cluster.structured.fair_thread_pool import FairThreadPool
from pagedray.errors import EngineError, InvalidRequestError, ShuttingDownError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cluster.serving.text.templates.template_code import TemplateCode

__all__ = ["ProgramTemplates", "RequestTemplates"]

logger = logging.getLogger(__name__)

_PARAM = "chat_template"
_MAX_LENGTH = 2**15
"""Characters of a template: templates of models have up to 20 000."""
_NUM_KEPT = 32
_RENDER_S = 0.5
"""CPU time of a rendering, since others with long conversations wait for it."""
_MAX_OPEN = 16
"""Maximum number of open compilations of one tenant."""
_MAX_OPEN_TOTAL = 64

_Key = tuple[str, str]


class RequestTemplates:
    """Compiles templates in another process, and keeps the most recently used templates.

    Used from one event loop, which it does not block: tenants take turns in a thread.
    """

    def __init__(
        self, special_tokens: Mapping[str, str], *, compiler: TemplateCompilerClient | None = None
    ) -> None:
        self._special_tokens = special_tokens
        self._compiler = TemplateCompilerClient() if compiler is None else compiler
        # While a thread uses the process, the other thread may be assigned to another tenant.
        self._threads = FairThreadPool(
            2,
            max_running=1,
            max_open=_MAX_OPEN,
            max_open_total=_MAX_OPEN_TOTAL,
            what="chat templates",
        )
        # By tenant, since the time would reveal whether another tenant has used a template.
        self._kept: OrderedDict[_Key, ChatTemplate] = OrderedDict()
        self._running: dict[_Key, asyncio.Future[ChatTemplate]] = {}

    def warm_up(self) -> None:
        """Start the process in a thread, so that no client waits for it."""
        with contextlib.suppress(ShuttingDownError):
            self._threads.submit_task("", self._start, size=0)

    async def template_of(self, source: str, tenant: str) -> ChatTemplate:
        """Return the template of a source, which takes long for the first request of a tenant.

        Raises RequestError, or EngineError if the process fails.
        """
        if len(source) > _MAX_LENGTH:
            raise InvalidRequestError(
                f"{_PARAM} may have at most {_MAX_LENGTH} characters, not {len(source)}.",
                param=_PARAM,
            )
        key = (tenant, source)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        running = self._running.get(key)
        if running is None:
            task = self._threads.submit_task(
                tenant, functools.partial(self._compiled, source), size=len(source)
            )
            running = self._running[key] = asyncio.wrap_future(task)
            running.add_done_callback(functools.partial(self._keep, key))
        # A call that is cancelled does not cancel the others that wait for the same template.
        # Since Python 3.14, asyncio.shield() would log the error of the template then.
        await asyncio.wait([running])
        return running.result()

    def stop_accepting(self) -> None:
        """Compile no more templates, and end the calls that wait for a template."""
        self._threads.close()

    def close(self) -> None:
        """End the process and the calls that wait for it. May be called twice."""
        self.stop_accepting()
        self._compiler.close()
        self._threads.join()

    def _compiled(self, source: str) -> ChatTemplate:
        return _template(
            source, self._special_tokens, self._compiler.compile_template, cpu_s=_RENDER_S
        )

    def _keep(self, key: _Key, done: asyncio.Future[ChatTemplate]) -> None:
        del self._running[key]
        if done.cancelled() or done.exception() is not None:
            return
        self._kept[key] = done.result()
        if len(self._kept) > _NUM_KEPT:
            self._kept.popitem(last=False)

    def _start(self) -> None:
        try:
            self._compiler.start_process()
        except (EngineError, OSError) as error:
            # The first template tries again, and reports the error to its client.
            logger.warning("%s", error)


class ProgramTemplates:
    """Compiles templates of the program that runs the engine, and keeps the last template."""

    def __init__(self, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = special_tokens
        self._last: ChatTemplate | None = None

    def template_of(self, source: str) -> ChatTemplate:
        """Return the template of a source. Raises InvalidRequestError."""
        if self._last is None or self._last.source != source:
            self._last = _template(source, self._special_tokens, compile_template, cpu_s=MAX_CPU_S)
        return self._last


def _template(
    source: str,
    special_tokens: Mapping[str, str],
    compile_source: Callable[[str], TemplateCode],
    *,
    cpu_s: float,
) -> ChatTemplate:
    """Return the template of a source. Raises InvalidRequestError."""
    try:
        code = compile_source(source)
    except InvalidTemplateError as error:
        raise InvalidRequestError(
            f"The request has an invalid chat template: {error}.", param=_PARAM
        ) from error
    return ChatTemplate(
        source, special_tokens, origin="The request", owner="request", cpu_s=cpu_s, code=code
    )
