"""Fixtures of the tests of the image: a Ray cluster of its pods."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from tests.image.base_image import FOLDER
from tests.image.ray_cluster import RayCluster

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def started() -> Iterator[RayCluster]:
    """The cluster with its pods running; the application is not deployed."""
    folder = FOLDER / "pods"
    shutil.rmtree(folder, ignore_errors=True)
    cluster = RayCluster.make(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.kill()


@pytest.fixture(scope="session")
def served(started: RayCluster) -> RayCluster:
    """The cluster with its application running."""
    answer = started.put_serve_config(started.token)
    assert answer.status_code == 200, answer.text
    started.wait_for_application()
    return started
