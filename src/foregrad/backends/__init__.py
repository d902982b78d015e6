from . import builtin  # noqa: F401 (puts the built-in backends into the registry, whichever part is asked for)
