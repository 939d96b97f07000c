"""Where the Hub and its cache are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["HubSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSettings:
    """The Hub, the cache of this node, and how long the Hub may be silent."""

    endpoint: str
    cache: Path
    is_offline: bool = False
    """Whether only the cache may be used."""
    answer_timeout_s: float = 30.0
    """How long the Hub may take to describe a model."""
    retry_s: float = 1.0
    """Pause before the first retry of a request that the Hub could not answer."""
    silence_s: float = 330.0
    """How long a download may receive nothing; the Hub's limits on requests last five minutes."""

    @classmethod
    def from_environment(cls, cache: Path | None = None) -> HubSettings:
        """Return the settings that huggingface_hub reads, such as HF_ENDPOINT and HF_HUB_OFFLINE.

        `cache` replaces the cache folder of the environment.
        """
        # Imported only if a model is on the Hub: it takes half a second.
        from huggingface_hub import constants

        return cls(
            endpoint=constants.ENDPOINT,
            cache=cache or Path(constants.HF_HUB_CACHE),
            is_offline=constants.HF_HUB_OFFLINE,
        )
