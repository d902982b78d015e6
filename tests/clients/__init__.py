"""Training programs of other people's libraries, from the package index, with random weights: `make clients`."""
