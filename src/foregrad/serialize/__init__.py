"""Graphs and plain values as data, and back: what artifacts and the cache on disk are made of."""
