"""Decides which calls a server accepts, before their texts are read."""

from __future__ import annotations

import time
from enum import Enum
from typing import TYPE_CHECKING

from cluster.serving.inputs import GenerationInput
from pagedray.errors import (
    DeadlineError,
    EngineError,
    InvalidRequestError,
    ShuttingDownError,
)

if TYPE_CHECKING:
    from cluster.serving.auth.authenticator import Authenticator
    from cluster.serving.auth.tenant import Tenant
    from cluster.serving.engine_client import EngineClient
    from cluster.serving.inputs import EmbeddingInput, ScoreInput
    from cluster.serving.memory.output_buffer import OutputBuffers
    from pagedray.model_config import ModelConfig, Task

__all__ = ["CallAdmission"]

_TASK_TEXTS: dict[Task, str] = {
    "generate": "generates text",
    "embed": "only computes embeddings",
    "score": "only scores pairs of texts",
}


class _Phase(Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


class CallAdmission:
    """Accepts calls of the model's task from when the model is loaded until a drain begins."""

    def __init__(
        self,
        client: EngineClient,
        model: ModelConfig,
        authenticator: Authenticator,
        buffers: OutputBuffers,
    ) -> None:
        self._client = client
        self._model = model
        self._authenticator = authenticator
        self._buffers = buffers
        self._phase = _Phase.STARTING

    @property
    def is_ready(self) -> bool:
        """Whether calls are accepted."""
        return self._phase is _Phase.READY

    @property
    def has_started(self) -> bool:
        """Whether the model was loaded."""
        return self._phase is not _Phase.STARTING

    def set_ready(self) -> bool:
        """Accept calls; return whether this is new. Has no effect once they are rejected."""
        if self._phase is not _Phase.STARTING:
            return False
        self._phase = _Phase.READY
        return True

    def stop(self) -> None:
        """Reject all calls from now on."""
        self._phase = _Phase.DRAINING

    def check_task(self, task: Task) -> None:
        """Raise InvalidRequestError if the model is for another task."""
        model = self._model
        if task == model.task:
            return
        text = _TASK_TEXTS[model.task]
        if (model.task, task) == ("generate", "embed"):
            text += "; for embeddings its server must be started with --task embed"
        elif (model.task, task) == ("generate", "score"):
            text += "; scores need a cross-encoder, or a reranker served with --task score"
        raise InvalidRequestError(f"The model {model.name} {text}.", param="model")

    def check_phase(self) -> None:
        """Raise EngineError or ShuttingDownError if no calls are accepted."""
        if self._phase is _Phase.STARTING:
            raise EngineError("The model is not loaded yet.")
        if self._phase is _Phase.DRAINING:
            raise ShuttingDownError

    def admit(self, given: GenerationInput | EmbeddingInput | ScoreInput) -> Tenant:
        """Return the tenant of a call. Raises RequestError or EngineError."""
        self.check_phase()
        tenant = self._authenticator.tenant_named(given.tenant)
        if given.deadline_s is not None and time.monotonic() >= given.deadline_s:
            raise DeadlineError("The deadline passed before the request arrived.")
        if not (isinstance(given, GenerationInput) and given.is_continued):
            self._client.engine.check_room(tenant.name, 0)
            self._buffers.check_room(tenant.name)
        return tenant
