"""Calls under `torch.func` transforms, and the levels of transforms inside a capture."""
