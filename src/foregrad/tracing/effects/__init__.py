"""A call's effects besides its outputs, in the signature's form."""
