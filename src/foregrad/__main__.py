"""`python -m foregrad`."""

from __future__ import annotations

import sys

from foregrad.tools import cli
from foregrad.tools.conformance.command import COMMANDS


def main() -> int:
    """Run the command line of the process, with the commands of all annexes."""
    return cli.main(more=COMMANDS)


if __name__ == "__main__":
    sys.exit(main())
