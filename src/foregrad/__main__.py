"""`python -m foregrad`."""

from __future__ import annotations

import sys

from foregrad.testing.command import add_check_compiler, add_check_partitioner
from foregrad.tools import cli


def main() -> int:
    """Run the command line of the process, with the commands of all annexes."""
    return cli.main(more=(add_check_compiler, add_check_partitioner))


if __name__ == "__main__":
    sys.exit(main())
