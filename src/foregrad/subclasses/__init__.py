"""Traceable wrapper subclasses: taken apart into plain tensors for the graphs, and made again from their results."""
