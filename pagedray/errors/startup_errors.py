"""Errors that prevent the start of an engine."""

from __future__ import annotations

from pagedray.errors.base import PagedRayError

__all__ = ["CheckpointError", "DeviceError", "StartupError"]


class StartupError(PagedRayError):
    """The engine cannot start; the message is one line: what was given and what is allowed."""


class CheckpointError(StartupError, ValueError):
    """A file of the model is missing, broken or describes something unsupported."""


class DeviceError(StartupError):
    """A device, port or other resource of the machine is not available."""
