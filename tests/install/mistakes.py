"""Mistakes that a type checker has to find: one in each line that says so."""

from client import loss_of

import foregrad

loss_of("no tensor", 1.0)  # wrong: an argument of another type
foregrad.compile(3)  # wrong: no function
x: int = foregrad.compile_times().seconds  # wrong: a float
