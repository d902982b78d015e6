"""Dependence on values: branches, sizes, numbers, constants."""
