"""A server of the bundled model with the options that an attack needs."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from tests.load.measured_server import MeasuredServer
from tests.load.tenant_keys import write_keys

if TYPE_CHECKING:
    from types import TracebackType

    from tests.hostile.attack import Attack

__all__ = ["HostileServer", "ServerOptions"]

# In bfloat16 the next two tokens' logits are often a rounding apart, so that the honest tenant's
# text depends on how many rows its steps have.
_COMMON = ("--dtype=float32", "--num-blocks=128", "--max-num-seqs=16", "--log-level=warning")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What attacks must have in common to share a server."""

    arguments: tuple[str, ...]
    has_keys: bool
    max_descriptors: int | None

    @classmethod
    def of(cls, attack: Attack) -> ServerOptions:
        """Return the options of an attack."""
        return cls(
            arguments=attack.arguments,
            has_keys=attack.has_keys,
            max_descriptors=attack.max_descriptors,
        )


class HostileServer:
    """A server with the tenants `honest` and `hostile`, as a context manager."""

    def __init__(self, options: ServerOptions, *, has_rank_processes: bool = False) -> None:
        self._stack = ExitStack()
        self.keys: dict[str, str] = {}
        """The tenants' keys; empty if the server requires none."""
        arguments = [*_COMMON, *options.arguments]
        if options.has_keys:
            folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
            self.keys = write_keys(folder / "keys.toml", "honest", "hostile")
            arguments.append(f"--api-keys={folder / 'keys.toml'}")
        self.measured = MeasuredServer(
            *arguments,
            has_rank_processes=has_rank_processes,
            max_descriptors=options.max_descriptors,
        )

    def __enter__(self) -> Self:
        self._stack.enter_context(self.measured)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)
