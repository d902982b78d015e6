"""Graphs that run on eager's kernels until another process has compiled them."""
