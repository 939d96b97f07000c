"""A file that records that the kernels of an engine are compiled."""

from __future__ import annotations

import logging
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pagedray.config import EngineConfig

__all__ = ["CompiledNote"]

logger = logging.getLogger(__name__)

_FOLDER = "pagedray"


class CompiledNote:
    """A file in the folder where Triton keeps kernels, for each configuration and kind of GPU."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        # Triton is imported only where it compiles.
        import triton

        from attention.kernels.triton.launches.kernel_keys import fix_kernel_keys

        kinds = (config, torch.cuda.get_device_name(device), triton.__version__, fix_kernel_keys())
        digest = sha256(repr(kinds).encode()).hexdigest()
        self._path = Path(triton.knobs.cache.dir) / _FOLDER / digest[:32]

    @property
    def exists(self) -> bool:
        """Return whether a rank with this configuration has compiled its kernels."""
        try:
            return self._path.exists()
        except OSError:
            return False

    def write(self) -> None:
        """Record that the kernels are compiled. Otherwise, the next start checks each of them."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch()
        except OSError as error:
            logger.info("Could not note in %s that kernels are compiled: %s", self._path, error)
