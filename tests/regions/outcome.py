"""What of a program with custom autograd Functions is compared with eager."""

from __future__ import annotations

import torch


def rnd(*shape, grad=True):
    return torch.randn(shape, dtype=torch.float64).requires_grad_(grad)


def f(x, w):
    return torch.tanh(x @ w) * x


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def outcome(make, compiled, *, orders=(1, 1)):
    """Calls of a program, for gradients of these orders: results, gradients, what is in its leaves, the generator; or the
    error.
    """
    torch.manual_seed(1)
    function, inputs, more = make()
    call, leaves = compiled(function), [*inputs, *more]
    return [_one_call(call, inputs, leaves, order) for order in orders]


def _one_call(call, inputs, leaves, order):
    torch.manual_seed(5)
    for leaf in leaves:
        leaf.grad = None
    for tensor in inputs:
        tensor.data = tensor.data + 0.1
    seen = {}
    try:
        results = tensors_in(call(*inputs))
        seen["results"] = [result.detach().clone() for result in results]
        seen["kinds"] = [
            (result.requires_grad, any(result is x for x in inputs), result.stride()) for result in results
        ]
        losses = [
            (result * torch.linspace(1, 2, result.numel(), dtype=result.dtype).reshape(result.shape)).sum()
            for result in results
            if result.requires_grad
        ]
        if losses and order == 1:
            sum(losses).backward()
        elif losses:
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            firsts = torch.autograd.grad(sum(losses), wanted, create_graph=True, allow_unused=True)
            seen["firsts"] = [None if g is None else g.detach() for g in firsts]
            seen["first kinds"] = [None if g is None else g.requires_grad for g in firsts]
            squares = [g.square().sum() for g in firsts if g is not None and g.requires_grad]
            if squares:
                sum(squares).backward()
        seen["gradients"] = [leaf.grad for leaf in leaves]
        seen["leaves"] = [leaf.detach().clone() for leaf in leaves]
        seen["next random number"] = [torch.rand(1)]
    except Exception as error:
        seen["error"] = type(error).__name__
        seen["text"] = str(error) if "differentiate twice" in str(error) else ""
    return seen


def difference(wanted, found, *, exact=True):
    """The name of the first thing that differs, or None."""
    for one, two in zip(wanted, found, strict=True):
        for name in dict.fromkeys((*one, *two)):
            if not _same(one.get(name), two.get(name), exact):
                return f"{name}: {one.get(name)} in eager, {two.get(name)}"
    return None


def _same(a, b, exact):
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_same(x, y, exact) for x, y in zip(a, b, strict=True))
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if type(a) is not type(b) or a.shape != b.shape or a.dtype != b.dtype:
            return False
        return torch.equal(a, b) if exact else torch.allclose(a, b, rtol=1e-9, atol=1e-10, equal_nan=True)
    return a == b
