"""Memory of a CPU pool that ranks open through the controller's process."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from pagedray.node_memory import MemoryAddress, NodeMemory, open_memory

WRITER = """
import os, sys
from pagedray.node_memory import MemoryAddress, open_memory
descriptor = open_memory(MemoryAddress(*sys.argv[1:]))
os.ftruncate(descriptor, 4)
os.pwrite(descriptor, b"kept", 0)
os.kill(os.getpid(), 9)
"""


def test_what_a_killed_process_wrote_is_read_by_the_next() -> None:
    with closing(NodeMemory("cpu-pool")) as memory:
        writer = subprocess.run([sys.executable, "-c", WRITER, *memory.address], check=False)
        assert writer.returncode == -9
        descriptor = open_memory(memory.address)
        assert os.pread(descriptor, 9, 0) == b"kept"
        os.close(descriptor)


def test_memory_has_no_name_and_is_open_to_its_user_alone() -> None:
    before = set(Path("/dev/shm").iterdir())
    with closing(NodeMemory("cpu-pool")) as memory:
        status = Path(memory.address.path).stat()
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert status.st_nlink == 0
        assert set(Path("/dev/shm").iterdir()) <= before


def test_memory_is_gone_once_nobody_uses_it() -> None:
    memory = NodeMemory("cpu-pool")
    memory.close()
    memory.close()
    with pytest.raises(FileNotFoundError, match="is not on this node"):
        open_memory(memory.address)


def test_what_else_has_the_path_is_not_opened(tmp_path: Path) -> None:
    # Opening it for writing would wait for a reader.
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    link = tmp_path / "link"
    link.symlink_to(pipe)
    with closing(NodeMemory("cpu-pool")) as memory, closing(NodeMemory("cpu-pool")) as other:
        for path in (str(link), other.address.path):
            with pytest.raises(FileNotFoundError, match="is not on this node"):
                open_memory(MemoryAddress(path, memory.address.label))


def test_memory_that_others_may_open_is_rejected() -> None:
    with closing(NodeMemory("cpu-pool")) as memory:
        Path(memory.address.path).chmod(0o666)
        with pytest.raises(PermissionError, match="open to other users"):
            open_memory(memory.address)


def test_labels_are_random() -> None:
    with closing(NodeMemory("cpu-pool")) as one, closing(NodeMemory("cpu-pool")) as other:
        assert one.address.label != other.address.label
