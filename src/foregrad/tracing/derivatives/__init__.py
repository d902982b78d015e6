"""The backward, and backwards of backwards."""
