"""`python -m foregrad`."""

from __future__ import annotations

import sys

from foregrad.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
