"""What operators give on fake tensors: layouts, formulas, checks, errors as the kernels say them."""
