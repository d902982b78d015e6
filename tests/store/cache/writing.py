"""A process that reads and writes entries of a few keys until it is killed: `python -m tests.store.cache.writing FOLDER`."""

import itertools
import sys

from foregrad.store.cache.store import Store


def main(folder):
    store = Store(folder, 1 << 30)
    for number in itertools.count():
        key = f"{number % 7:064x}"
        found = store.read(key)
        assert found is None or found == [key, key * 3000], "torn"
        store.write(key, {"name": "f", "what": "halves"}, [key, key * 3000])


if __name__ == "__main__":
    main(*sys.argv[1:])
