"""The board in shared memory that ranks write and their controller reads."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from contextlib import closing
from typing import TYPE_CHECKING

from pagedray.node_memory import MemoryAddress
from pagedray.rank_progress import Phase, ProgressBoard, ProgressWord
from tests.fakes import wait_for

if TYPE_CHECKING:
    from pathlib import Path

WRITER = """
import sys, time
from pagedray.node_memory import MemoryAddress
from pagedray.rank_progress import Phase, ProgressWord
from workers.gpu_worker import start_heartbeat
progress = ProgressWord()
start_heartbeat(progress)
progress.attach(MemoryAddress(*sys.argv[1:3]), int(sys.argv[3]))
progress.enter(Phase.LAYER, 7)
progress.begin_collective(Phase.ALL_REDUCE)
time.sleep(60)
"""


def test_controller_reads_where_another_process_stands_even_if_it_is_stopped() -> None:
    with closing(ProgressBoard(2)) as board:
        writer = subprocess.Popen([sys.executable, "-c", WRITER, *board.address, "1"])
        try:
            wait_for(lambda: board.report(1).phase is Phase.ALL_REDUCE, 60.0)
            wait_for(lambda: board.report(1).num_beats >= 2, 60.0)
            os.kill(writer.pid, signal.SIGSTOP)
            report = board.report(1)
            assert report.place == "the all-reduce of layer 7"
            assert report.pid == writer.pid
            assert board.report(0).pid == 0
        finally:
            # Also ends a process that is stopped.
            writer.kill()
            writer.wait()


def test_a_process_that_may_open_no_files_is_seen_to_run() -> None:
    with closing(ProgressBoard(1)) as board:
        writer = subprocess.Popen([sys.executable, "-c", WRITER, *board.address, "0"])
        try:
            wait_for(lambda: board.report(0).phase is Phase.ALL_REDUCE)
            _, most = resource.prlimit(writer.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(writer.pid, resource.RLIMIT_NOFILE, (0, most))
            num_beats = board.report(0).num_beats
            # After some, it looks for compilers.
            wait_for(lambda: board.report(0).num_beats >= num_beats + 6)
        finally:
            writer.kill()
            writer.wait()


def test_a_year_of_words_fits_into_the_cell() -> None:
    progress = ProgressWord()
    progress._count = 2**40 - 2
    words = []
    for _ in range(3):
        progress.enter(Phase.LAYER, 2)
        words.append(progress.word)
    assert len(set(words)) == 3
    assert {word & 0xFFFFFF for word in words} == {2 << 8 | Phase.LAYER}


def test_every_word_differs_from_those_before() -> None:
    with closing(ProgressBoard(1)) as board:
        progress = ProgressWord()
        progress.attach(board.address, 0)
        words = []
        for _ in range(3):
            progress.enter(Phase.LAYER, 2)
            words.append(board.report(0).word)
            progress.begin_collective(Phase.ALL_GATHER)
            words.append(board.report(0).word)
            assert board.report(0).phase.is_collective
            progress.end_collective()
            words.append(board.report(0).word)
            assert board.report(0).place == "layer 2"
        assert len(set(words)) == len(words)


def test_process_of_an_old_epoch_does_not_write_to_a_new_board() -> None:
    with closing(ProgressBoard(1)) as old, closing(ProgressBoard(1)) as new:
        late, current = ProgressWord(), ProgressWord()
        late.attach(old.address, 0)
        current.attach(new.address, 0)
        current.enter(Phase.LAYER, 3)
        before = new.report(0)
        late.enter(Phase.LAYER, 9)
        late.finish_step(100)
        assert new.report(0) == before


def test_what_cannot_be_pinned_is_shown_in_every_epoch() -> None:
    progress = ProgressWord()
    progress.note_unpinned(7)
    for _ in range(2):
        with closing(ProgressBoard(1)) as board:
            progress.attach(board.address, 0)
            assert board.report(0).num_unpinned == 7


def test_board_that_cannot_be_opened_leaves_the_word_private() -> None:
    progress = ProgressWord()
    progress.finish_step(4)
    progress.attach(MemoryAddress("/proc/1/fd/none", "pagedray-progress"), 0)
    progress.enter(Phase.GRAPH, 64)
    # Steps of another epoch do not count.
    assert progress.cells()[2] == 0


def test_a_rank_on_another_node_does_not_write_to_what_has_the_path_there(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_bytes(b"x" * 4096)
    with closing(ProgressBoard(1)) as board, closing(ProgressBoard(1)) as other:
        before = other.report(0)
        for path in (other.address.path, str(file)):
            progress = ProgressWord()
            progress.attach(MemoryAddress(path, board.address.label), 0)
            progress.enter(Phase.LAYER, 3)
        assert other.report(0) == before
    assert file.read_bytes() == b"x" * 4096


def test_every_phase_has_a_text() -> None:
    with closing(ProgressBoard(1)) as board:
        progress = ProgressWord()
        progress.attach(board.address, 0)
        for phase in Phase:
            progress.enter(phase, 5)
            assert board.report(0).place
