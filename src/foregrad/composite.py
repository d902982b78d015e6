"""A function and its derivative as one compiled graph: `value_and_grad`, `hessian_vector_product`.

The derivative is taken during the capture, so a call runs one graph and no autograd engine, and values that forward and
derivative share are computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, ParamSpec, TypeVar, overload

import torch

from ._torch.engine import forward_ad, transforms_active
from .api import compile as compile_
from .frontend.tree import flatten
from .graph.source import a_name

Pack = Callable[[Sequence[torch.Tensor]], Any]
P = ParamSpec("P")
R = TypeVar("R")
Aux = TypeVar("Aux")


@overload
def value_and_grad(
    fn: Callable[P, R],
    argnums: int | Sequence[int] | None = ...,
    has_aux: Literal[False] = ...,
    *,
    create_graph: bool = ...,
    **settings: object,
) -> Callable[P, tuple[R, Any]]: ...


@overload
def value_and_grad(
    fn: Callable[P, tuple[R, Aux]],
    argnums: int | Sequence[int] | None = ...,
    *,
    has_aux: Literal[True],
    create_graph: bool = ...,
    **settings: object,
) -> Callable[P, tuple[tuple[R, Aux], Any]]: ...


@overload
def value_and_grad(
    fn: Callable[P, object],
    argnums: int | Sequence[int] | None = ...,
    has_aux: bool = ...,
    *,
    create_graph: bool = ...,
    **settings: object,
) -> Callable[P, tuple[Any, Any]]: ...


def value_and_grad(
    fn: Callable[..., object],
    argnums: int | Sequence[int] | None = 0,
    has_aux: bool = False,
    *,
    create_graph: bool = False,
    **settings: object,
) -> Callable[..., Any]:
    """A function that returns the value of `fn` and its gradient, `value, gradient`, computed by a single graph.

    Args:
        fn: a function or module that returns a real number as a tensor (one element, any shape). With `has_aux` it
            returns a pair: the number, and any value.
        argnums: the positional argument to differentiate by, or several. An argument may be a container of tensors.
            None: by the parameters of the module `fn` that require grad.
        has_aux: the result is `((value, aux), gradient)`.
        create_graph: results can be differentiated again by autograd; without it they are constants, like results of
            `torch.autograd.grad`. Inside a torch.func transform they always can.
        settings: as for `compile`.

    Returns:
        A function. The gradient has the structure of the argument: a tuple for several arguments, a dict by name for
        parameters. The gradient of an input that the value does not depend on is zero.

    Raises `TypeError` for an argument that has no gradient or that a call lacks, `ValueError` for a value that is not
    one real number.

    Examples:
        >>> import torch, foregrad
        >>> square = foregrad.value_and_grad(lambda x: (x * x).sum(), backend="eager")
        >>> square(torch.tensor([1.0, 2.0]))
        (tensor(5.), tensor([2., 4.]))
    """
    variables = _Variables(fn, argnums)

    def both(keep: bool, /, *args: object, **kwargs: object) -> Any:
        with torch.enable_grad():
            args, leaves, packed = variables.of(args, keep)
            value, aux = _split(fn(*args, **kwargs), has_aux)
            _check_value(value)
            gradients = _gradients([value], leaves, [torch.ones_like(value)], keep)
        if not keep:
            value, aux = value.detach(), _detached(aux)
        return ((value, aux) if has_aux else value), packed(gradients)

    return _compiled(both, f"value_and_grad of {variables.name}", create_graph, settings)


def hessian_vector_product(
    fn: Callable[..., Any], argnums: int | Sequence[int] | None = 0, *, create_graph: bool = False, **settings: object
) -> Callable[..., Any]:
    """A function of `(*args, vector)` that returns the product of the Hessian of `fn` at `args` with the vector.

    Reverse over reverse (Pearlmutter, 1994): the gradient of the gradient's product with the vector.

    Args:
        fn: returns one real number as a tensor.
        argnums, create_graph, settings: as for `value_and_grad`.

    Returns:
        A function of the arguments of `fn` and, last, a vector with the structure of the gradient; the result has that
        structure too.

    Examples:
        >>> import torch, foregrad
        >>> product = foregrad.hessian_vector_product(lambda x: (x**3).sum(), backend="eager")
        >>> product(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0]))  # the Hessian is diag(6 x)
        tensor([6., 0.])
    """
    variables = _Variables(fn, argnums)

    def product(keep: bool, /, *args: Any, **kwargs: Any) -> Any:
        if not args:
            raise TypeError("the last positional argument is the vector")
        vector = flatten(args[-1])[0]
        with torch.enable_grad():
            args, leaves, packed = variables.of(args[:-1], keep)
            value = fn(*args, **kwargs)
            _check_value(value)
            gradients = _gradients([value], leaves, [torch.ones_like(value)], True)
            if len(vector) != len(gradients):
                raise TypeError(f"the vector has {len(vector)} tensors, the gradient {len(gradients)}")
            return packed(_gradients(gradients, leaves, vector, keep))

    return _compiled(product, f"hessian_vector_product of {variables.name}", create_graph, settings)


def _compiled(function: Callable[..., object], name: str, keep: bool, settings: dict[str, Any]) -> Callable[..., Any]:
    """`function(keep, *args, **kwargs)` compiled, called with `keep`, or under a transform with True."""

    def one(*args: Any, **kwargs: object) -> Any:
        # While it is captured: every graph is guarded by whether a transform is on.
        differentiated = transforms_active() or forward_ad._current_level >= 0
        return function(keep or differentiated, *args, **kwargs)

    one.__name__ = one.__qualname__ = name
    compiled: Callable[..., Any] = compile_(one, **settings)
    return compiled


class _Variables:
    """The tensors to differentiate with respect to, and the structure of their gradients."""

    def __init__(self, fn: Any, argnums: int | Sequence[int] | None) -> None:
        self.fn = fn
        self.name = getattr(fn, "__name__", type(fn).__name__)
        if argnums is None and not isinstance(fn, torch.nn.Module):
            raise TypeError(f"argnums=None differentiates by the parameters of a module; {self.name} is no module")
        self.single = isinstance(argnums, int)
        self.argnums: tuple[int, ...] | None = None
        if argnums is not None:
            self.argnums = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    def of(self, args: tuple[Any, ...], keep: bool) -> tuple[tuple[Any, ...], list[torch.Tensor], Pack]:
        """(the arguments for `fn`, the tensors among them to differentiate with respect to, a packer of gradients)."""
        if self.argnums is None:
            parameters = {name: p for name, p in self.fn.named_parameters() if p.requires_grad}
            return args, list(parameters.values()), lambda gradients: dict(zip(parameters, gradients, strict=True))
        new, variables, trees = list(args), [], []
        for number in self.argnums:
            if not -len(args) <= number < len(args):
                raise TypeError(f"argnums names argument {number} (from 0); a call of `{self.name}` has {len(args)}")
            leaves, tree = flatten(args[number])
            for leaf in leaves:
                if not isinstance(leaf, torch.Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
                    what = f"a tensor of {leaf.dtype}" if isinstance(leaf, torch.Tensor) else type(leaf).__name__
                    raise TypeError(
                        f"argument {number} of `{self.name}` holds {what}: only floating-point and complex tensors "
                        "have gradients"
                    )
            fresh = [_variable(leaf, keep) for leaf in leaves]
            new[number] = tree.unflatten(fresh)
            variables += fresh
            trees.append((tree, len(leaves)))

        def packed(gradients: Sequence[torch.Tensor]) -> Any:
            left = iter(gradients)
            parts = [tree.unflatten([next(left) for _ in range(count)]) for tree, count in trees]
            return parts[0] if self.single else tuple(parts)

        return tuple(new), variables, packed


def _variable(leaf: torch.Tensor, keep: bool) -> torch.Tensor:
    """The variable in place of an argument; with the argument's history only if `keep`."""
    if keep and leaf.requires_grad:
        return leaf.view_as(leaf)
    return leaf.detach().requires_grad_()


def _split(result: object, has_aux: bool) -> tuple[Any, Any]:
    if not has_aux:
        return result, None
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError("with has_aux=True the function returns a pair (value, aux)")
    return result


def _detached(value: object) -> Any:
    leaves, tree = flatten(value)
    return tree.unflatten([leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])


def _gradients(
    values: Sequence[torch.Tensor], leaves: list[torch.Tensor], cotangents: Sequence[torch.Tensor], keep: bool
) -> Sequence[torch.Tensor]:
    """The sum of the gradients of `values`; zeros if no value depends on a leaf."""
    pairs = [(value, cotangent) for value, cotangent in zip(values, cotangents, strict=True) if value.requires_grad]
    if not pairs:
        return [torch.zeros_like(leaf) for leaf in leaves]
    needed, given = zip(*pairs, strict=True)
    return torch.autograd.grad(needed, leaves, given, create_graph=keep, materialize_grads=True)


def _check_value(value: object) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"the function returns {a_name(type(value).__name__)}, not a tensor")
    if value.numel() != 1 or value.is_complex():
        raise ValueError(
            f"the function returns a tensor of shape {tuple(value.shape)}, {value.dtype}, not one real number"
        )
