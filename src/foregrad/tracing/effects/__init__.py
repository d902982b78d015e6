"""What a call does besides computing its outputs, as the signature says it."""
