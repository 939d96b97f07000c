"""How much of a model a rank has downloaded or loaded."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LoadProgress"]


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """The activity of a rank before it runs, and how much of it is done."""

    what: str = "Loading weights"
    done: int = 0
    """Tensors that are loaded, or bytes that are downloaded."""
    total: int = 0
    """The number for the whole model; 0 while it is unknown."""
    is_download: bool = False

    @property
    def fraction(self) -> float:
        """The part that is done, 0 to 1; 0 while the total is unknown."""
        return self.done / self.total if self.total else 0.0
