"""Refusals about memory and gradients, one function a rule: each is a row of docs/limits.md.

`what` begins the sentence: `args[0]`, `the output out[1]`. `where`: the user's line.
"""

from __future__ import annotations

from ...errors import UnsupportedAliasError, UnsupportedMutationError


def of_exchanged_memory(what: str, where: str = "") -> UnsupportedAliasError:
    """A result that PyTorch takes for a view of its own or its base's former memory."""
    return UnsupportedAliasError(
        f"{what} is, or shares memory with, a view and its memory, or its base's memory, was exchanged or resized in "
        f"place (`.data = ...`, `resize_`){_at(where)}: for PyTorch it stays a view of the former memory. Return a "
        "copy."
    )


def detached_and_written(what: str, where: str = "") -> UnsupportedAliasError:
    """A view of memory that is detached, and written with gradients: its history differs from its contents."""
    return UnsupportedAliasError(
        f"{what} is in memory that is detached in the call, or copied by `reshape`, and written with "
        f"gradients{_at(where)}: PyTorch gives it a history that does not match its values, or none. Use `x = "
        "x.detach()`, or return a copy."
    )


def taken_before(what: str, where: str = "") -> UnsupportedAliasError:
    """A view taken before a change of gradients; a call takes views last."""
    return UnsupportedAliasError(
        f"{what} is a view, and `requires_grad` of its base changes in place{_at(where)} (`requires_grad_`, "
        "`detach_`). Take the view afterwards, or return a copy."
    )


def set_in_place(where: str) -> UnsupportedMutationError:
    """`set_` replaces a tensor's memory: it counts as a write and has no derivative."""
    return UnsupportedMutationError(
        f"`set_` at {where} gives a tensor other memory. Assign to `.data`, copy the elements (`copy_`), or do it "
        "outside the compiled function. (LSTM, GRU and RNN of cuDNN do it with their weights.)"
    )


def given_to_a_view(where: str) -> UnsupportedMutationError:
    """Autograd keeps a view's base, even if the view gets a new memory."""
    return UnsupportedMutationError(
        f"`.data = ...` at {where} gives other memory to a view, or to a tensor that shares the memory of an argument. "
        "Copy the elements (`copy_`), or assign to the base."
    )


def changed_with_gradients(what: str, where: str) -> UnsupportedMutationError:
    """Autograd fixes a gradient's metadata when the node is created, so one tensor can't need two layouts."""
    return UnsupportedMutationError(
        f"{what} changes sizes, dtype, history or memory in place (`.data = ...`, `detach_`) at {where}, while "
        "gradients are needed from before and after the change, or while views exist. Use a copy: `y = x.clone()`."
    )


def resized_with_gradients(where: str) -> UnsupportedMutationError:
    """Autograd takes a view again by its operators: not after its own or its base's sizes changed."""
    return UnsupportedMutationError(
        "sizes of an argument, of a view, or of a tensor that has views are changed in place (`squeeze_`, `t_`, "
        f"`resize_`) at {where}, and the values in this memory need a gradient. Change sizes out of place, as in `x "
        "= x.squeeze()`, or under torch.no_grad() on a detached tensor."
    )


def past_the_edges(where: str = "") -> UnsupportedAliasError:
    """A view that eager takes by its place in memory, not the place that autograd derives from its operators."""
    return UnsupportedAliasError(
        f"a view{_at(where)} goes past the edges of its source (`as_strided`), or elements of the source share "
        "memory (`expand`), and the memory needs a gradient or is written: take the view of the source's base, or of "
        "a copy."
    )


def written_by_lists(what: str, where: str) -> UnsupportedAliasError:
    """Autograd gives a tensor that one operator on lists writes to twice gradients of one of the writes."""
    return UnsupportedAliasError(
        f"{what} is written to by a `_foreach_` operator at {where}, with gradients, twice or together with a second "
        "tensor in its memory: PyTorch keeps the gradients of only one write. Write in separate operators, or to a "
        "copy."
    )


def in_some_backwards(what: str) -> UnsupportedMutationError:
    """A backward's effects happen in each backward of the function."""
    return UnsupportedMutationError(
        f"{what} has a side effect (it writes to tensors or checks values) that only some backward passes run. Write "
        "in each backward, detach the part that raises or leads to no input, or write outside."
    )


def written_by_backward(what: str, where: str, why: str) -> UnsupportedMutationError:
    """A backward writes to elements of an unchanged or a shared tensor."""
    return UnsupportedMutationError(
        f"{where} writes to {what}, {why}. Write to a new tensor or a copy, under torch.no_grad() or detached."
    )


def changed_wrapper(what: str) -> UnsupportedMutationError:
    """Only the plain tensors of a wrapper subclass may be written; nothing else may change."""
    return UnsupportedMutationError(
        f"{what}: this changes its history, sizes, metadata or inner tensors. Write under torch.no_grad(), or do it "
        "outside the compiled function."
    )


def returned_wrapper(what: str) -> UnsupportedAliasError:
    """A wrapper subclass that is a result is put together anew, once."""
    return UnsupportedAliasError(f"{what}: return copies (`clone`).")


def _at(where: str) -> str:
    return f" at {where}" if where else ""
