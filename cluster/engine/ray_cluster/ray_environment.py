"""The environment of the Ray processes that this process starts: a token, an address, time limits.

Any client of the ports of Ray can run code as its user. So Ray listens on the loopback interface
alone, and requires a token.
"""

from __future__ import annotations

import logging
import os
import secrets

from ray._private import ray_constants
from ray._private.authentication.authentication_utils import is_token_auth_enabled
from ray._raylet import (  # type: ignore[attr-defined]  # a module in C
    AuthenticationTokenLoader,
    Config,
)

from pagedray.errors import StartupError

__all__ = ["RECONNECT_VARIABLE", "RayEnvironment", "warn_if_unauthenticated"]

logger = logging.getLogger(__name__)

RECONNECT_VARIABLE = "RAY_gcs_rpc_server_reconnect_timeout_s"
_MODE = "RAY_AUTH_MODE"
_TOKEN = "RAY_AUTH_TOKEN"
_CLUSTER = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


class RayEnvironment:
    """Variables in the environment of this process until `close`."""

    def __init__(self, *, allow_unauthenticated: bool, reconnect_s: int) -> None:
        """Provide a token unless the operator has.

        Ray's processes continue for `reconnect_s` without GCS. Raises StartupError if the operator
        has turned tokens off.
        """
        names = (_MODE, _TOKEN, _CLUSTER, RECONNECT_VARIABLE)
        self._before = {name: os.environ.get(name) for name in names}
        self._was_cluster = ray_constants.ENABLE_RAY_CLUSTER
        mode = self._before[_MODE] or "token"
        if mode.lower() != "token" and not allow_unauthenticated:
            raise StartupError(
                f"{_MODE}={mode} would let every user of this machine run code through Ray; unset "
                "it, or use --allow-unauthenticated-ray."
            )
        # Ray lowers the priority of its workers by default.
        os.environ.setdefault("RAY_worker_niceness", "0")
        os.environ[RECONNECT_VARIABLE] = str(reconnect_s)
        # Otherwise Ray replaces the address of the loopback by that of another interface.
        os.environ[_CLUSTER] = "0"
        ray_constants.ENABLE_RAY_CLUSTER = False
        if mode.lower() == "token":
            os.environ[_MODE] = "token"
            loader = AuthenticationTokenLoader.instance()
            if not loader.has_token(ignore_auth_mode=True):
                # Ray would write a token to the home directory.
                os.environ[_TOKEN] = secrets.token_hex(32)
        _read_environment()

    def close(self) -> None:
        """Restore the environment, in which a later Ray may have another token."""
        for name, value in self._before.items():
            if value is not None:
                os.environ[name] = value
            else:
                os.environ.pop(name, None)
        ray_constants.ENABLE_RAY_CLUSTER = self._was_cluster
        _read_environment()


def warn_if_unauthenticated() -> None:
    """Log a warning if the Ray to which this process is connected requires no token."""
    if not is_token_auth_enabled():
        logger.warning(
            "The Ray cluster does not require a token: anyone who can reach its ports can run code "
            "as its user; see docs/security.md."
        )


def _read_environment() -> None:
    """Let Ray read the environment again."""
    AuthenticationTokenLoader.instance().reset_cache()
    Config.initialize("")
