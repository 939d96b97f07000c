"""Entry point of `python -m cluster.cli`, the command `pagedray`."""

import sys

from cluster.cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
