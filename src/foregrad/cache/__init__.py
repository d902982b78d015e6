"""The cache on disk: what was worked out for a graph, kept for the next process under a key of all it depends on."""
