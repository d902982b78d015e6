"""The one door to private torch names: nothing outside this package touches an underscored one.

Each module names the wrapped parts and the checked torch versions, so a new release of torch is ported here alone.
"""
