"""Operators' results on fake tensors: layouts, formulas, checks, errors in the kernels' words."""
