"""Graphs that run on eager's kernels until a second process has compiled them."""
