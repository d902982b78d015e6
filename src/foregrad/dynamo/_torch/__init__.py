"""The door of `foregrad.dynamo` to private names of PyTorch."""
