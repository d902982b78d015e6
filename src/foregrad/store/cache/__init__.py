"""The cache on disk: results for a graph, kept for other processes under a key of everything they depend on."""
