"""Partitions within a budget of bytes."""
