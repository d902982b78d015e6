"""Programs that write to arguments, view them and return aliases."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.parity.idioms.common import interior, leaf, plain, program


@program(lambda: (leaf(3), None, 2.5))
def none_and_numbers_as_arguments(x, n, k):
    return (x * k, n, k)


@program(lambda: (leaf(3, 3), leaf(3, 3)))
def one_output(a, b):
    return a + b


@program(lambda: (leaf(3, 3), leaf(3, 3)))
def two_outputs(a, b):
    return (a + b, a - b)


@program(lambda: (leaf(3, 3), leaf(3, 3)))
def a_list_of_outputs(a, b):
    return [a + b, a - b]


@program(lambda: (interior(4, 1),))
def a_copy_squeezed_and_written(a):
    b = a.clone().squeeze(-1)
    b.add_(1.0)
    return a + b


@program(lambda: (plain(4, 1), interior(4)))
def an_argument_squeezed_in_place(a, b):
    return a.squeeze_(-1) * b


@program(lambda: (interior(4, 1),))
def a_result_squeezed_in_place(a):
    return (a * 2).squeeze_(-1) + 1


@program(lambda: (torch.randn(3, 3, dtype=torch.complex64, requires_grad=True),))
def a_complex_linear(x):
    return nn.functional.linear(x, x.conj()).abs().sum()


@program(lambda: (torch.tensor([0, 1, 2, 2]), leaf(10, 3), torch.tensor([0, 2])))
def a_view_of_an_embedding_bag(i, w, o):
    return F.embedding_bag(i, w, o)[:, :2]


@program(lambda: (interior(3, 3),))
def an_argument_written(a):
    a.mul_(2)
    return a * 3


@program(lambda: (plain(3, 3),))
def an_argument_without_gradients_written(a):
    a.mul_(2)
    return a * 3


@program(lambda: (interior(3, 3), None, 3))
def an_argument_written_beside_none(a, b, c):
    a.mul_(c)
    return a * 3


@program(lambda: (interior(3, 3),))
def the_written_argument_returned(a):
    a.mul_(2)
    return a


@program(lambda: (interior(3, 3), plain(3, 3), interior(3, 3)))
def two_arguments_written(a, b, c):
    a.mul_(2)
    c.mul_(2)
    return a + b + c


@program(lambda: (interior(3, 3),))
def an_in_place_operator_returned(a):
    return torch.sin(a, out=None) if False else a.sin_()


@program(lambda: (plain(3, 3), plain(3, 3)))
def an_argument_transposed_in_place(a, b):
    a.transpose_(1, 0)
    return a + b


@program(lambda: (interior(3, 3), plain(3, 3)))
def a_result_with_gradients_transposed_in_place(a, b):
    c = a * 2
    c.transpose_(1, 0)
    c[0].mul_(2)
    return c + b


@program(lambda: (plain(2, 4),))
def an_argument_transposed_and_written(a):
    a.t_()
    a[0].mul_(2)
    return a.view(a.shape)


@program(lambda: (interior(2, 4),))
def a_view_before_a_write(a):
    x = a.unsqueeze(0)
    a.mul_(2)
    return x


@program(lambda: (interior(2, 4),))
def a_detached_alias_before_a_write(a):
    x = a.detach()
    a.mul_(2)
    return (a, x)


@program(lambda: (plain(3, 3),))
def an_argument_made_to_require_grad(a):
    a.requires_grad_(True)
    return (a.mul(3), a.mul(4))


def alias_pair():
    b = interior(4)
    return (b, b.view(4))


@program(alias_pair)
def aliases_written_and_unsqueezed(a, b):
    a.mul_(2)
    return a * b.unsqueeze(0)


@program(lambda: (interior(2, 2),))
def a_view_of_an_argument(a):
    return a.view(-1)


@program(lambda: (interior(2, 2),))
def an_argument_and_its_views(a):
    return (a.view(-1), a.view(4).view(2, 2), a)


@program(lambda: (interior(2, 2), interior(2, 2), interior(2, 2)))
def views_of_two_of_three_arguments(a, b, c):
    return (c.view(-1), b.t())


@program(lambda: (interior(2, 2),))
def a_view_of_an_intermediate(a):
    o = a.mul(3)
    return o.view(-1)


@program(lambda: (interior(2, 2),))
def an_intermediate_and_its_view(a):
    o = a.mul(3)
    return (o.view(-1), o)


@program(lambda: (interior(2, 2),))
def an_intermediate_and_three_views(a):
    o = a.mul(3)
    return (o, o.view(-1), o.unsqueeze(0), o.t())


@program(lambda: (interior(2, 2),))
def an_intermediate_written_through_its_view(a):
    o = a.mul(3)
    o2 = o.view(-1)
    o2.mul_(2)
    return (o, o2)


@program(lambda: (interior(2, 2),))
def parts_of_an_intermediate(a):
    o = a.mul(3)
    return o.unbind(0)


@program(lambda: (interior(4, 2),))
def parts_of_an_argument(a):
    return a.split(2)


@program(lambda: (interior(4, 2),))
def an_intermediate_and_its_parts(a):
    o = a * 2
    x, y = o.chunk(2)
    return (x, y, o)


@program(lambda: (interior(3, 3), interior(3, 3)))
def every_kind_of_alias(a, b):
    o = a + b
    a.mul_(2)
    return (o, o.view(-1), a, a.view(-1), b.t(), b)


@program(lambda: (interior(3, 3), interior(3, 3)))
def a_detached_argument_beside_the_other(a, b):
    return (a.detach(), b)


@program(lambda: (interior(3, 3), interior(3, 3)))
def a_value_without_gradients_beside_an_argument(a, b):
    return (a.detach().add(1), b)


@program(lambda: (leaf(4), leaf(4)))
def a_gradient_inside(x, y):
    return torch.autograd.grad((x * y).sum(), x, create_graph=True)[0] * y


@program(lambda: (leaf(4),))
def grad_modes_inside(x):
    with torch.no_grad():
        y = x.sin()
    with torch.enable_grad():
        z = x.cos()
    return (y * x, z.detach(), z)


@program(alias_pair)
def two_aliases_one_written(a, b):
    a.add_(1)
    return a + b


def overlapping_slices():
    b = interior(4)
    return (b[:2], b[2:], b)


@program(overlapping_slices)
def the_first_of_three_aliases_written(a, b, c):
    a.mul_(2)
    return a + b + c[:2]


@program(overlapping_slices)
def three_aliases_written_and_viewed(a, b, c):
    b.mul_(3)
    c.add_(1)
    return (c.view(2, 2), b.t(), a.view(-1), a + b)


def transposed_pair():
    b = torch.randn(4, 3, requires_grad=True) * 1
    v = b.t()
    return (v, b[0])


@program(transposed_pair)
def a_transposed_alias_written(a, b):
    a.mul_(2)
    return (a + 1, b * 3)


def aliases_and_none():
    b = interior(4)
    return (b, None, b.view(2, 2))


@program(aliases_and_none)
def aliases_beside_none(a, n, b):
    b.mul_(2)
    return a + 1


@program(lambda: (interior(3, 3),))
def a_written_argument_viewed(a):
    a.add_(1)
    return a.view(-1)


@program(lambda: (interior(2, 2), plain(2, 2), interior(2, 2)))
def arguments_transposed_written_and_viewed(a, b, c):
    b.transpose_(1, 0)
    c.add_(1)
    return (b + a, c.view(-1), a)


@program(lambda: (interior(3),))
def an_intermediate_written_twice(a):
    b = a.clone()
    b.add_(a)
    c = b.view(-1)
    c.mul_(2)
    return b


def same_twice():
    a = interior(3)
    return (a, a)


@program(same_twice)
def one_tensor_twice_written(a, b):
    a.mul_(2)
    return a + b


@program(same_twice)
def one_tensor_twice_returned(a, b):
    return (a, b, a + b)


def same_five():
    a, b = (interior(3), interior(3))
    return (a, b, a, b, a)


@program(same_five)
def two_tensors_five_times(a, b, c, d, e):
    a.mul_(2)
    return (c + e, b, d.unsqueeze(0))


@program(lambda: (interior(3),))
def one_output_twice(a):
    x = a * 2
    return (x, x, a)


@program(lambda: (leaf(3),))
def an_intermediate_resized(a):
    x = a.detach().clone()
    x.resize_(5)
    x.zero_()
    return (a * 2, x)


class MyMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        return (g * y, g * x)


@program(lambda: (leaf(3), leaf(3)), order=2)
def a_custom_function(a, b):
    return MyMul.apply(a, b).sin()
