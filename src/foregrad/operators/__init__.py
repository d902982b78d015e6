"""Operators and torch functions with rules of their own: attention, sparse values, functions of data."""
