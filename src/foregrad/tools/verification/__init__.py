"""`verify`: a compiled function against eager, stage by stage, to the first operator that differs."""
