"""Programs of operators, containers, derivatives inside and modes."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.parity.idioms.common import interior, leaf, plain, program


@program(lambda: (leaf(5, 5),))
def random_numbers(a):
    return a * torch.rand_like(a) + F.dropout(a, 0.5)


@program(lambda: (leaf(5, 5),))
def random_leaky_relu(a):
    return F.rrelu(a, training=True)


@program(lambda: (leaf(5, 5),))
def mixed_precision(a):
    with torch.autocast("cpu", torch.bfloat16):
        return a @ a


@program(lambda: (leaf(5, 5),))
def a_copy_and_a_view(a):
    return (a.t().contiguous().view(-1), a.t())


@program(lambda: (leaf(2, 3, 4, 4),))
def channels_last(a):
    return a.to(memory_format=torch.channels_last) * 2


@program(lambda: (plain(3),))
def an_argument_written_under_no_grad(a):
    with torch.no_grad():
        a.mul_(2)
    return a + 1


@program(lambda: (leaf(3),))
def a_leaf_written_under_no_grad(a):
    with torch.no_grad():
        a.mul_(2)
    return a + 1


@program(lambda: (leaf(3),))
def a_leaf_written_through_detach(a):
    a.detach().mul_(2)
    return a + 1


@program(lambda: (leaf(3),))
def a_leaf_written_through_data(a):
    y = a.sin()
    a.data.mul_(2)
    return y + a


@program(lambda: (interior(4, 4),))
def parts_taken_under_no_grad(a):
    with torch.no_grad():
        x, y = a.chunk(2)
    return (x, y)


@program(lambda: (interior(4, 4),))
def a_view_taken_under_no_grad(a):
    with torch.no_grad():
        x = a.view(-1)
    return (x, a * 1)


@program(lambda: ([interior(3), interior(3)],))
def a_list_written(xs):
    torch._foreach_mul_(xs, 2.0)
    return torch._foreach_add(xs, 1)


@program(lambda: (plain(3), [plain(3), plain(3)]))
def buffers_in_a_list_written(x, xs):
    torch._foreach_add_(xs, [x, x])
    return xs[0] + 1


@program(lambda: ({"a": leaf(3), "b": [leaf(3), {"c": leaf(3)}]},))
def nested_containers(d):
    return {"z": d["a"] * d["b"][1]["c"], "w": (d["b"][0], None, 3, "s")}


@program(lambda: (leaf(3, 4),))
def values_and_indices(a):
    v, i = a.topk(2)
    return (v, i)


@program(lambda: (leaf(3, 4),))
def sorted_values(a):
    v, i = a.sort()
    return (v.cumsum(0), i)


@program(lambda: (leaf(4, 4),))
def linear_algebra(a):
    return (torch.linalg.inv(a + 5 * torch.eye(4)), torch.linalg.svdvals(a), torch.linalg.qr(a)[1])


@program(lambda: (leaf(4, 4),))
def eigenvectors(a):
    return torch.linalg.eigh(a + a.t())


@program(lambda: (leaf(6),))
def as_strided_views(a):
    return (a.as_strided((2, 3), (3, 1), 0) + 1, torch.as_strided(a * 2, (2, 2), (1, 1), 1))


@program(lambda: (interior(6),))
def scattered_views(a):
    return (torch.as_strided_scatter(a, torch.ones(2), (2,), (2,), 1), a.select_scatter(a[0], 0, 2))


@program(lambda: (leaf(3, 3), torch.tensor([0, 2])))
def written_by_index(a, i):
    b = a.clone()
    b[i] = 0
    b[i, 1] += 2
    return b


@program(lambda: (leaf(3, 3), torch.tensor([[0, 2, 1]]), leaf(1, 3)))
def scatter_and_gather(a, i, self):
    return (a.scatter(0, i, self), a.scatter_add(0, i, self), a.gather(0, i))


@program(lambda: (leaf(3, 3),))
def masks(a):
    return (a.masked_fill(a > 0, 1.0), torch.where(a > 0, a, 0), a[a.detach() > -100])


@program(lambda: (leaf(2, 3, 8),))
def attention_operator(a):
    return F.scaled_dot_product_attention(a, a, a, is_causal=True)


@program(lambda: (leaf(2, 4, 8, 8),))
def a_convolution(a):
    return F.conv2d(a, torch.ones(3, 4, 3, 3), padding=1)


@program(lambda: (interior(3),))
def data_assigned(a):
    b = a.detach() * 2
    a.data = b
    return a + 1


@program(lambda: (interior(3),))
def a_value_as_a_number(a):
    return a * a.detach().sum().item()


@program(lambda: (interior(3),))
def a_branch_on_a_value(a):
    return a * 2 if a.sum() > 0 else a * 3


@program(lambda: (leaf(3, 3),))
def a_contraction(a):
    return torch.einsum("ij,jk,kl->il", a, a, a)


@program(lambda: (leaf(3, 3), leaf(3)))
def joined_tensors(a, b):
    return (torch.cat([a, b[None]]), torch.stack([b, b]), torch.hstack([b, b]))


@program(lambda: (leaf(3),))
def an_output_its_sum_and_its_detached_alias(a):
    y = a**2
    return (y, y.sum(), y.detach())


@program(lambda: (leaf(3),), order=2)
def a_gradient_penalty(a):
    (g,) = torch.autograd.grad((a**3).sum(), a, create_graph=True)
    return (g * g).sum()


@program(lambda: (leaf(3),))
def func_transforms_inside(a):
    return (torch.func.grad(lambda x: (x**3).sum())(a), torch.func.jacrev(torch.sin)(a))


@program(lambda: (leaf(5, 3),))
def vmap_inside(a):
    return torch.func.vmap(lambda x: x * x.sum())(a)


@program(lambda: (leaf(3),))
def jvp_inside(a):
    return torch.func.jvp(torch.sin, (a,), (torch.ones(3),))


@program(lambda: (leaf(3),))
def a_tensor_hook(a):
    b = a * 2
    b.register_hook(lambda g: g * 3)
    return b.sin()


@program(lambda: (leaf(4, 3),))
def checkpointed_dropout(a):
    return torch.utils.checkpoint.checkpoint(lambda x: F.dropout(x.sin(), 0.3).cos(), a, use_reentrant=False)


@program(lambda: (plain(3).long(), leaf(5, 3)))
def integers(i, w):
    return (F.embedding(i.abs() % 5, w), i + 1)


@program(lambda: (leaf(3), torch.tensor(True)))
def booleans(a, b):
    return (torch.where(b, a, -a), ~b)


@program(lambda: (interior(3),))
def an_argument_copied_over(a):
    a.copy_(a * 2)
    return a.view(3, 1)


@program(lambda: (interior(3), plain(3)))
def casts_in_copies(a, b):
    b.copy_(a.detach())
    a.copy_(b.double())
    return (a, b)


@program(lambda: (interior(2, 3),))
def an_argument_zeroed_and_filled(a):
    a.zero_()
    a[0] = 1
    a.fill_(3.0)
    return a.exp()


@program(lambda: (interior(2, 3),))
def expanded_arguments(a):
    return (a.expand(4, 2, 3), a.expand(4, 2, 3).sum(0))


@program(lambda: (interior(4),))
def parts_of_a_complex_tensor(a):
    z = torch.complex(a, a)
    return (z.real, z.imag, torch.view_as_real(z))


@program(lambda: (plain(2, 2), interior(2, 2)))
def axes_swapped_in_place(a, b):
    a.swapaxes_(0, 1)
    a.unsqueeze_(0)
    a.squeeze_(0)
    c = b * 2
    c.swapaxes_(0, 1)
    return a + 1, c.unsqueeze_(0).squeeze_(0)


@program(lambda: (leaf(3),))
def constants_as_outputs(a):
    return (torch.ones(3), torch.arange(4), 3, a)


@program(lambda: (leaf(3),))
def a_backward_inside(a):
    x = a.detach().requires_grad_()
    (x**2).sum().backward()
    return a * x.grad
