"""The door of `foregrad.operators` to private names of PyTorch."""
