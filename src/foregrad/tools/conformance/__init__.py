"""The conformance suite for compilers of graphs and for partitioners: `foregrad.testing` offers it."""
