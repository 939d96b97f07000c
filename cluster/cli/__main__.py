"""Runs the command `pagedray`: `python -m cluster.cli`."""

import sys

from cluster.cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
