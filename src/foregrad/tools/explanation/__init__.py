"""`foregrad.explain`: how a function was compiled, its costs, and changes that would lower them."""
