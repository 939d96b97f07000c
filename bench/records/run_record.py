"""The record of a run of an engine, or of a part of one, in `bench/results/`."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from bench.records.command import command_and_date
from pagedray import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["write_results"]


def write_results(path: Path, shape: str, **results: Sequence[Any]) -> None:  # Any: dataclasses
    """Write the results by their names, with the device and the versions that gave them."""
    has_gpu = torch.cuda.is_available()
    record = {
        **command_and_date(),
        "device": torch.cuda.get_device_name() if has_gpu else platform.machine(),
        "pagedray": __version__,
        "torch": torch.__version__,
        "shape": shape,
    } | {name: [asdict(one) for one in found] for name, found in results.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
