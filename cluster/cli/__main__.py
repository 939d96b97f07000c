"""Entry point of the command `pagedray`, which is also `python -m cluster.cli`."""

import sys

from cluster.cli.process import INTERRUPT_EXIT, exiting_at_interrupt, open_standard_streams
from pagedray.machine import leave_removed_folder

__all__ = ["main"]


def main() -> int:
    open_standard_streams()
    leave_removed_folder()
    with exiting_at_interrupt():
        from cluster.cli.commands import main as run_command
    try:
        return run_command()
    except KeyboardInterrupt:
        return INTERRUPT_EXIT


if __name__ == "__main__":
    sys.exit(main())
