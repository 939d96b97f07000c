"""The flags of `pagedray deploy`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cluster.cli.flag_values import seconds

if TYPE_CHECKING:
    import argparse

__all__ = ["add_check_flags", "add_fetch_flags", "add_hold_flags", "add_status_flags"]

_CHART = Path("deploy/helm/pagedray")


def add_check_flags(parser: argparse.ArgumentParser) -> None:
    """Add what `deploy check` reads."""
    parser.add_argument(
        "values",
        type=Path,
        nargs="+",
        metavar="VALUES",
        help="Files of Helm values; a later one replaces values of those before it.",
    )
    parser.add_argument(
        "--chart", type=Path, default=_CHART, metavar="FOLDER", help="The chart of PagedRay."
    )
    parser.add_argument(
        "--release", default="pagedray", metavar="NAME", help="Name of the Helm release."
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="FOLDER",
        help="A local copy of the model, to compare its size with the claim. (default: ask the Hub "
        "if the model is on it)",
    )


def add_fetch_flags(parser: argparse.ArgumentParser) -> None:
    """Add what `deploy fetch` downloads."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="Hub id, ORG/NAME or ORG/NAME@REVISION, or s3://BUCKET/PREFIX.",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="FOLDER",
        help="Where to download a model of S3.",
    )
    parser.add_argument(
        "--wait",
        action="store_true",
        help="Download nothing; wait until another process has downloaded the last file.",
    )


def add_hold_flags(parser: argparse.ArgumentParser) -> None:
    """Add what `deploy hold` waits for."""
    parser.add_argument(
        "--address", default="127.0.0.1:6379", metavar="ADDRESS", help="Address of Ray's GCS."
    )
    parser.add_argument(
        "--limit-s",
        type=seconds(0, 86400),
        default=150.0,
        metavar="SECONDS",
        help="Wait no longer than this.",
    )


def add_status_flags(parser: argparse.ArgumentParser) -> None:
    """Add what `deploy status` reads."""
    parser.add_argument(
        "release",
        nargs="?",
        default="pagedray",
        metavar="NAME",
        help="Name of the Helm release, which the RayService has.",
    )
    parser.add_argument(
        "-n",
        "--namespace",
        metavar="NAMESPACE",
        help="Namespace of the release. (default: kubectl's)",
    )
    parser.add_argument(
        "--file",
        type=Path,
        metavar="FILE",
        help="JSON of kubectl get to read instead, - is standard input. (default: run kubectl)",
    )
