"""Operators and torch functions with rules of their own: attention, branches, functions of data."""
