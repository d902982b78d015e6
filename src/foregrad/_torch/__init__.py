"""The one door to private torch names: nothing outside this package touches an underscored one.

Each module says what it wraps and on which torch versions that was checked, so that a new release of torch is
ported here and nowhere else.
"""
