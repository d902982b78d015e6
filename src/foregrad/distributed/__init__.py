"""Collectives, checkpointed regions and buckets: what training on several devices adds to a capture."""
