"""More programs: derivatives inside, custom Functions, random numbers, loops and branches, checkpoints, hooks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.parity.idioms.common import leaf, plain, program


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, k):
        ctx.save_for_backward(x)
        ctx.k = k
        return x * k, x.sum()

    @staticmethod
    def backward(ctx, g, h):
        (x,) = ctx.saved_tensors
        return g * ctx.k + h * x.cos(), None


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, g):
        return g


class Written(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, g):
        return g * 2


class Separate(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.exp(), (x > 0)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[0])

    @staticmethod
    def backward(ctx, g, _):
        return g * ctx.saved_tensors[0]


class Unmaterialized(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, g, h):
        return (g * 2 if g is not None else 0) + (h * 3 if h is not None else 0)


@program(lambda: (leaf(3),))
def a_function_with_two_outputs(a):
    first, second = Scaled.apply(a, 2.0)
    return first * second


@program(lambda: (leaf(3),))
def a_straight_through_estimator(a):
    return Straight.apply(a * 3) * a


@program(lambda: (leaf(3),))
def a_function_that_writes(a):
    return Written.apply(a * 1).sin()


@program(lambda: (leaf(3),))
def a_function_with_setup_context(a):
    value, mask = Separate.apply(a)
    return value * mask, mask


@program(lambda: (leaf(3),))
def a_function_without_zeros(a):
    first, _ = Unmaterialized.apply(a)
    return first.sin()


@program(lambda: (leaf(3),))
def functions_in_a_row(a):
    for _ in range(3):
        a = Straight.apply(Scaled.apply(a, 1.5)[0])
    return a


@program(lambda: (leaf(3), leaf(3)))
def a_second_derivative_inside(a, b):
    (g,) = torch.autograd.grad((a.sin() * b).sum(), a, create_graph=True)
    (h,) = torch.autograd.grad(g.square().sum(), b, create_graph=True)
    return g + h


@program(lambda: (leaf(3), leaf(3)))
def gradients_of_some(a, b):
    g, nothing = torch.autograd.grad((a * a).sum(), [a, b], allow_unused=True)
    return g * b, nothing


@program(lambda: (leaf(3), plain(3)))
def a_vector_product_inside(a, v):
    (g,) = torch.autograd.grad(a.exp() * a, a, v, create_graph=True)
    return g.sum()


@program(lambda: (plain(3),))
def a_derivative_by_a_new_leaf(a):
    x = a.detach().clone().requires_grad_()
    return torch.autograd.grad(x.sin().sum(), x)[0] * a


@program(lambda: (leaf(3),))
def a_few_steps_of_descent_inside(a):
    x = a
    for _ in range(3):
        (g,) = torch.autograd.grad((x - 1).square().sum(), x, create_graph=True)
        x = x - 0.1 * g
    return x


@program(lambda: (leaf(3),))
def a_jacobian_inside(a):
    return torch.autograd.functional.jacobian(lambda x: x.sin() * x.sum(), a, create_graph=True)


@program(lambda: (plain(3),))
def transforms_of_transforms(a):
    return torch.func.hessian(lambda x: (x.sin() * x).sum())(a), torch.func.vmap(torch.func.grad(torch.sin))(a)


@program(lambda: (plain(3), plain(3)))
def forward_over_reverse_inside(a, v):
    return torch.func.jvp(torch.func.grad(lambda x: x.exp().sum() * x[0]), (a,), (v,))


@program(lambda: (plain(2, 3), plain(3)))
def a_batch_of_gradients(a, w):
    return torch.func.vmap(torch.func.grad(lambda w, x: (w @ x).tanh()), in_dims=(None, 0))(w, a)


@program(lambda: (leaf(3, 3),))
def a_checkpoint_in_a_checkpoint(a):
    def inner(x):
        return x.sin() @ x

    def outer(x):
        return checkpoint(inner, x, use_reentrant=False).cos() * x

    return checkpoint(outer, a, use_reentrant=False)


@program(lambda: (leaf(8),))
def checkpointed_random_numbers(a):
    return checkpoint(lambda x: F.dropout(x, 0.3) * torch.rand_like(x), a, use_reentrant=False)


@program(lambda: (leaf(8),))
def many_kinds_of_random_numbers(a):
    numbers = torch.randn(8) + torch.randint(0, 3, (8,)) + torch.randperm(8) + torch.bernoulli(torch.full((8,), 0.5))
    return a * numbers, F.dropout(a, 0.2), torch.normal(a.detach(), 1.0), torch.empty(8).uniform_(0, 1) * a


@program(lambda: (leaf(4, 3),))
def samples(a):
    picked = torch.multinomial(a.detach().softmax(-1), 2)
    return a.gather(1, picked), F.gumbel_softmax(a, hard=True), torch.distributions.Normal(a, 1.0).rsample()


@program(lambda: (leaf(3), 4))
def a_loop_over_a_number(a, n):
    for i in range(n):
        a = a.sin() if i % 2 else a.cos() * i
    return a


@program(lambda: (leaf(3),))
def a_loop_until_a_value(a):
    b = a.abs() + 0.1
    while b.sum() < 50:
        b = b * 2
    return b


@program(lambda: (leaf(3),))
def a_branch_that_returns_other_things(a):
    if a.sum() > 100:
        return a
    return a * 2, a.sum()


@program(lambda: (leaf(3),))
def a_hook_on_an_intermediate(a):
    b = a.sin()
    b.register_hook(lambda g: g * 2)
    return b * a


@program(lambda: (leaf(3),))
def two_hooks_and_one_removed(a):
    b = a.exp()
    b.register_hook(lambda g: g + 1)
    b.register_hook(lambda g: g * 0).remove()
    return b.sum()


@program(lambda: (leaf(3), leaf(3)))
def detached_in_the_middle(a, b):
    c = (a * b).detach()
    d = a * c
    return d, c, d.detach() * b


@program(lambda: (leaf(3),))
def gradients_switched(a):
    with torch.no_grad():
        b = a * 2
        with torch.enable_grad():
            c = a * 3
    with torch.set_grad_enabled(False):
        d = c * 2
    return b + c, d


@program(lambda: (leaf(3), leaf(3)))
def a_loss_of_many_terms(a, b):
    terms = [
        F.mse_loss(a, b),
        F.l1_loss(a, b),
        F.smooth_l1_loss(a, b),
        F.huber_loss(a, b),
        F.cosine_similarity(a, b, 0),
    ]
    return sum(terms), terms[0].detach()


@program(lambda: (leaf(4, 5), torch.tensor([1, 0, 4, 2])))
def losses_of_classes(a, target):
    logs = a.log_softmax(-1)
    weighted = F.cross_entropy(a, target, weight=torch.arange(1.0, 6.0), label_smoothing=0.1)
    return F.nll_loss(logs, target), weighted, F.multi_margin_loss(a, target)


@program(lambda: (leaf(2, 1, 4, 4),))
def pools_and_samples(a):
    values, where = F.max_pool2d(a, 2, return_indices=True)
    grid = F.affine_grid(torch.eye(2, 3).expand(2, 2, 3), (2, 1, 3, 3), align_corners=False)
    return (
        F.max_unpool2d(values, where, 2),
        F.grid_sample(a, grid, align_corners=False),
        F.interpolate(a, scale_factor=2),
    )


@program(lambda: (leaf(1, 2, 4), leaf(3, 2, 2), leaf(3)))
def convolutions(a, w, b):
    return (
        F.conv1d(a, w, b),
        F.conv_transpose1d(F.conv1d(a, w), w),
        F.conv1d(a, w, stride=2, padding=1),
        F.unfold(a[:, :, None], (1, 2)),
    )


@program(lambda: (leaf(2, 2, 3, 4),))
def attention_with_masks(a):
    mask = torch.ones(3, 3, dtype=torch.bool).tril()
    causal = F.scaled_dot_product_attention(a, a, a, is_causal=True)
    return F.scaled_dot_product_attention(a, a, a, attn_mask=mask), causal


@program(lambda: (leaf(3), leaf(3)))
def a_function_of_functions(a, b):
    def twice(f):
        return lambda x: f(f(x))

    made = [twice(torch.sin), twice(lambda x: x * b)]
    return [f(a) for f in made]


@program(lambda: (leaf(3), leaf(3)))
def a_generator_inside(a, b):
    def partial_sums():
        total = torch.zeros(3)
        for item in (a, b, a * b):
            total = total + item
            yield total

    return list(partial_sums())


@program(lambda: (leaf(3),))
def an_exception_caught(a):
    try:
        a.view(7)
    except RuntimeError:
        a = a * 2
    return a


@program(lambda: (leaf(2, 3), leaf(4)))
def an_error_of_shapes(a, b):
    return a + b


@program(lambda: (leaf(3),))
def an_error_of_a_leaf_written(a):
    a.mul_(2)
    return a


@program(lambda: (plain(2, 3),))
def stacked_and_split(a):
    parts = torch.stack([a, a * 2]).split([1, 1])
    return torch.vstack(parts), torch.hstack([part.flatten() for part in parts]), torch.block_diag(a, a)


@program(lambda: (leaf(3),))
def a_lazy_conjugate(a):
    b = torch.complex(a, a * 2)
    return b.conj().imag, torch.resolve_conj(b.conj()) * 2, (b.conj() * b).real


@program(lambda: (leaf(3),))
def tensors_made_inside(a):
    grid = torch.meshgrid(torch.arange(3.0), torch.linspace(0, 1, 3), indexing="ij")
    return a * torch.eye(3) + grid[0], torch.full_like(a, 2) * a, a.new_zeros(2), torch.tensor([1.0, 2.0, 3.0]) * a


@program(lambda: (leaf(3),))
def numbers_from_shapes(a):
    return a.view(-1, 1).expand(-1, a.numel()) / a.shape[0], a.new_ones(a.size()), torch.zeros(a.dim())
