"""Stand-ins for what a function is given or closes over, and tensors that escape a capture."""
