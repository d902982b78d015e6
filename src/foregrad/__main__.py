"""`python -m foregrad`."""

from __future__ import annotations

import sys

from foregrad.testing.command import COMMANDS
from foregrad.tools import cli


def main() -> int:
    """Run the command line of the process, with the commands of all annexes."""
    return cli.main(more=COMMANDS)


if __name__ == "__main__":
    sys.exit(main())
