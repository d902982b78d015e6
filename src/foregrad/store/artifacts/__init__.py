"""Artifacts: captured functions as files of data. `capture` makes one, `container` is its file, `module` runs it."""
