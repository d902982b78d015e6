"""The door of `foregrad.classes` to private names of PyTorch."""
