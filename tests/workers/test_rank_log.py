"""What a rank logs waits for its controller; warnings are also written to standard error."""

from __future__ import annotations

import logging
import subprocess
import sys

from pagedray.batch import RankLogLine
from workers.rank_lifecycle import RankLog

PROGRAM = """
import logging
from workers.rank_lifecycle import capture_log

log = capture_log()
logger = logging.getLogger("workers.weights")
logger.debug("a detail")
logger.info("Loaded %d GB", 3)
try:
    raise OSError("no space left")
except OSError:
    logger.warning("Blocks are lost.", exc_info=True)
for line in log.take_lines():
    print(line.level, line.text.splitlines()[0], "|", line.text.splitlines()[-1])
"""


def test_lines_are_captured_and_warnings_are_written() -> None:
    # In another process, since a rank takes the log of its process.
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        f"{logging.INFO} Loaded 3 GB | Loaded 3 GB",
        f"{logging.WARNING} Blocks are lost. | OSError: no space left",
    ]
    assert done.stderr.startswith("Blocks are lost.\nTraceback")
    assert "Loaded" not in done.stderr


def test_the_oldest_of_too_many_lines_are_dropped() -> None:
    log = RankLog()
    for number in range(1500):
        log.handle(logging.makeLogRecord({"levelno": logging.INFO, "msg": str(number)}))
    lines = log.take_lines()
    assert (len(lines), lines[-1]) == (1000, RankLogLine(logging.INFO, "1499"))
    assert not log.has_lines
