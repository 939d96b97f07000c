"""The flags of `pagedray deploy`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cluster.cli.flag import seconds

if TYPE_CHECKING:
    import argparse

__all__ = ["add_check_flags", "add_fetch_flags", "add_hold_flags", "add_status_flags"]

_CHART = Path("deploy/helm/pagedray")


def add_check_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `deploy check`."""
    parser.add_argument(
        "values",
        type=Path,
        nargs="+",
        metavar="VALUES",
        help="Files of Helm values; later files override earlier files.",
    )
    parser.add_argument(
        "--chart",
        type=Path,
        default=_CHART,
        metavar="FOLDER",
        help="Folder of PagedRay's Helm chart.",
    )
    parser.add_argument(
        "--release", default="pagedray", metavar="NAME", help="Name of the Helm release."
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="FOLDER",
        help="Local copy of the model, to compare its size with the claim's. (default: "
        "ask the Hub, if the model is there)",
    )


def add_fetch_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `deploy fetch`."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="Hub id, ORG/NAME or ORG/NAME@REVISION, or s3://BUCKET/PREFIX.",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="FOLDER",
        help="Folder to download a model from S3 into.",
    )
    parser.add_argument(
        "--wait",
        action="store_true",
        help="Do not download; wait until another process has downloaded the last file.",
    )


def add_hold_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `deploy hold`."""
    parser.add_argument(
        "--address", default="127.0.0.1:6379", metavar="ADDRESS", help="Address of Ray's GCS."
    )
    parser.add_argument(
        "--limit-s",
        type=seconds(0, 86400),
        default=150.0,
        metavar="SECONDS",
        help="Maximum time to wait.",
    )


def add_status_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `deploy status`."""
    parser.add_argument(
        "release",
        nargs="?",
        default="pagedray",
        metavar="NAME",
        help="Name of the Helm release, which is also that of the RayService.",
    )
    parser.add_argument(
        "-n",
        "--namespace",
        metavar="NAMESPACE",
        help="Namespace of the release. (default: the current one of kubectl)",
    )
    parser.add_argument(
        "--file",
        type=Path,
        metavar="FILE",
        help="File with the JSON output of kubectl get, or - for standard input. (default: run "
        "kubectl)",
    )
