"""What depends on values: branches, sizes, numbers, constants."""
