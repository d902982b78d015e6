"""Graphs and plain values as data, and back, for artifacts and for the cache on disk."""
