"""The door of `foregrad.python` to private names of PyTorch."""
