"""Pauses do not continue what another fault has hung."""

import asyncio
import random
import subprocess
from collections.abc import Iterator
from typing import cast

import psutil
import pytest

from tests.chaos.faults import HangRank, Scene, pause
from tests.chaos.targets import Target
from tests.fakes import wait_for

SECONDS = 0.2


class Ranks:
    """A target as far as these faults know it."""

    def __init__(self, processes: list[psutil.Process]) -> None:
        self._processes = processes

    def ranks(self) -> list[psutil.Process]:
        return self._processes


@pytest.fixture
def process() -> Iterator[psutil.Process]:
    with subprocess.Popen(["sleep", "60"]) as sleeping:
        yield psutil.Process(sleeping.pid)
        sleeping.kill()


@pytest.fixture
def scene(process: psutil.Process) -> Scene:
    target = cast("Target", Ranks([process]))
    return Scene(target=target, generator=random.Random(0), key="", relays=())


def is_stopped(process: psutil.Process) -> bool:
    return process.status() == psutil.STATUS_STOPPED


def test_paused_process_continues(scene: Scene, process: psutil.Process) -> None:
    asyncio.run(pause(scene, [process], seconds=SECONDS))
    wait_for(lambda: not is_stopped(process))


@pytest.mark.parametrize("hangs_first", [False, True])
def test_hung_process_stays_so_through_a_pause(
    scene: Scene, process: psutil.Process, hangs_first: bool
) -> None:
    async def run() -> None:
        hang = HangRank(scene)
        if hangs_first:
            await hang.inject()
        pausing = asyncio.create_task(pause(scene, [process], seconds=SECONDS))
        await asyncio.sleep(0)
        await hang.inject()
        await pausing
        assert not hang.is_over()

    asyncio.run(run())
    assert is_stopped(process)
