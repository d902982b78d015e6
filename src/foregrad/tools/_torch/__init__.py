"""The door of `foregrad.tools` to private names of PyTorch."""
