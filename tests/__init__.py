"""The tests. Whatever of them runs, by pytest or as a command, a refusal is to be seen: no call runs eagerly instead."""

import os

os.environ.setdefault("FOREGRAD_ON_UNSUPPORTED", "raise")
