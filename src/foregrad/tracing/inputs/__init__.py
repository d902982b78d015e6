"""Stand-ins for a function's arguments and closed-over tensors, and tensors that escape a capture."""
