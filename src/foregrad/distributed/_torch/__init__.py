"""The door of `foregrad.distributed` to private names of PyTorch."""
