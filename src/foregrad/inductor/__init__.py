"""The Inductor backend: repeated regions, segments, convolutions, and numbers of the graph."""
