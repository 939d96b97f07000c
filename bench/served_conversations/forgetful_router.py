"""A router that Serve's processes import."""

from __future__ import annotations

import random
from typing import Any

from cluster.serving.ray_serve.placement import Placement
from cluster.serving.ray_serve.router import AffinityRouter

__all__ = ["ForgetfulRouter"]


class ForgetfulRouter(AffinityRouter):
    """The router without its memory of where load has moved a key."""

    def initialize_state(self, **settings: Any) -> None:  # Any: settings of all types
        """Take the deployment's settings."""
        super().initialize_state(**settings)
        self._placement = Placement(slack=settings["slack"], draws=random.Random(), most_keys=0)
