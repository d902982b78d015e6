"""Tensors made in inference mode inside a function, and outside it inside one that is called in it, are what they are
in eager; so are views taken with gradients on in a call without.
"""

from __future__ import annotations

import pytest
import torch

import foregrad
from tests.programs import Table

program = PROGRAMS = Table()


@program
def made_inside(x, y):
    with torch.inference_mode():
        made = x * 2
    return made, y + 1


@program
def constants(x, y):
    with torch.inference_mode():
        made = torch.ones(3)
    return made, torch.zeros(3), made + 1


@program
def views(x, y):
    with torch.inference_mode():
        made = x * 2
        part = made[1:]
    return part, made, made.view(3, 1)


@program
def views_alone(x, y):
    with torch.inference_mode():
        return (x.sin().view(3, 1).t(),)


@program
def written_inside(x, y):
    with torch.inference_mode():
        made = x.clone().mul_(2)
        y.add_(1)
    return made, y * 2


@program
def view_of_an_argument(x, y):
    with torch.inference_mode():
        return y[1:], x.detach()


@program
def outside_inside(x, y):
    with torch.inference_mode(False), torch.no_grad():
        made = torch.ones(3)
        part = made[:2]
    return made, part


@program
def nested(x, y):
    with torch.inference_mode():
        first = y * 2
        with torch.inference_mode(False):
            second = y * 3
        third = first + second
    return first, second, third, y.sin()


@program
def both_kinds_of_memory(x, y):
    with torch.inference_mode():
        made = torch.complex(y, y).conj()
    return made, torch.complex(y, y).conj()


@program
def gradients_beside(x, y):
    z = x * 2
    with torch.inference_mode():
        made = z.exp()
    return z * made.clone() if torch.is_inference_mode_enabled() else z, made


@program
def gradients_on(x, y):
    with torch.inference_mode(False), torch.enable_grad():
        z = x.sin() * 2
    return (z,)


@program
def view_with_gradients_on(x, y):
    with torch.inference_mode(False), torch.enable_grad():
        z = torch.stack([x, y])[0]
    return z, y + 1


def told(tensor):
    has_views = not tensor.is_inference() and tensor.requires_grad
    return tensor.is_inference(), tensor.requires_grad, tensor.detach().tolist(), has_views and tensor._is_view()


def outcome(function, context):
    x, y = torch.tensor([1.0, 2.0, 3.0], requires_grad=True), torch.tensor([4.0, 5.0, 6.0])
    try:
        with context():
            results = function(x, y)
    except RuntimeError as error:
        return type(error)
    found = [told(result) for result in (*results, x, y)]
    shared = [[a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() for a in results] for b in results]
    roots = [result for result in results if result.grad_fn is not None]
    if roots:
        found += [gradient.tolist() for gradient in torch.autograd.grad([root.sum() for root in roots], x)]
    return found, shared


@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_of_eagers_mode(name, context):
    compiled = foregrad.compile(PROGRAMS[name], backend="eager")
    for _ in range(2):
        assert outcome(compiled, context) == outcome(PROGRAMS[name], context)


@pytest.mark.parametrize("name", ["made_inside", "constants", "written_inside", "views"])
def test_results_are_of_eagers_mode_under_torch_compile(name):
    torch._dynamo.reset()
    compiled = torch.compile(PROGRAMS[name], backend="foregrad", options={"backend": "eager"})
    for _ in range(2):
        assert outcome(compiled, torch.enable_grad) == outcome(PROGRAMS[name], torch.enable_grad)


def test_no_inference_mode_no_line():
    compiled = foregrad.compile(lambda x: (x * 2, x[1:]), backend="eager")
    compiled(torch.ones(3))
    assert "other_mode" not in compiled.foregrad.source()
