"""`pagedray deploy check`: reports Helm values that cannot work, before anything starts."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

from cluster.cli.deploy.rules import rule_errors
from cluster.cli.deploy.values import read_values, schema_errors, spelling_errors
from cluster.cli.deploy.weight_size import folder_weight_bytes, hub_weight_bytes, s3_weight_bytes
from pagedray.errors import CheckpointError
from workers.hub.problems import HubUnreachableError
from workers.s3.location import S3_SCHEME

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from cluster.cli.deploy.values import Values

__all__ = ["check"]

_EXAMPLE = "registry.example.com/"
"""No registry: the default of the chart, which users replace."""


def check(paths: Sequence[Path], *, chart: Path, release: str, checkpoint: Path | None) -> int:
    """Print a line for each error, and return 1 after any. Raises StartupError.

    Files are merged as by Helm: values of later files win.
    """
    values = read_values(paths, chart)
    names = ", ".join(map(str, paths))
    errors = [f"{path}: {error}" for path in paths for error in spelling_errors(path)]
    # The rules rely on the requirements of the schema.
    if not errors:
        errors = [f"{names}: {error}" for error in schema_errors(values, chart)]
    if not errors:
        weight_bytes = _weight_bytes(values, checkpoint)
        found = rule_errors(values, release=release, weight_bytes=weight_bytes)
        errors = [f"{names}: {error}" for error in found]
    for error in errors:
        print(error)
    if errors:
        return 1
    print(f"{names}: no errors found. To deploy:")
    command = ["helm", "install", release, str(chart)]
    for path in paths:
        command += ["--values", str(path)]
    if values["image"]["repository"].startswith(_EXAMPLE):
        command += ["--set", "image.repository=REGISTRY/pagedray"]
    print(f"\n    {shlex.join(command)}")
    return 0


def _weight_bytes(values: Values, checkpoint: Path | None) -> int | None:
    if checkpoint is not None:
        return folder_weight_bytes(checkpoint)
    if values["model"].startswith("/"):
        return None
    try:
        if values["model"].startswith(S3_SCHEME):
            return s3_weight_bytes(values["model"])
        return hub_weight_bytes(values["model"])
    except HubUnreachableError as error:
        reason = error.reason
    except CheckpointError as error:
        if not values["model"].startswith(S3_SCHEME):
            raise
        # The credentials of the Job may be others.
        reason = str(error).rstrip(".")
    print(f"The size of the weights is not checked: {reason}.", file=sys.stderr)
    return None
