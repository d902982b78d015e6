"""The door of `foregrad.inductor` to private names of PyTorch."""
