"""More programs: structured arguments and outputs, writes one after the other, dtypes, families of operators."""

from __future__ import annotations

import collections
from typing import NamedTuple

import torch
import torch.nn.functional as F

from tests.parity.idioms.common import interior, leaf, plain, program

# ------------------------------------------------------------------------------------------------ outputs and arguments


class Pair(NamedTuple):
    first: object
    second: object


@program(lambda: (leaf(3), leaf(3)))
def a_named_tuple_returned(a, b):
    return Pair(a * b, Pair(a.sin(), None))


@program(lambda: (Pair(leaf(3), plain(3)),))
def a_named_tuple_given(pair):
    return pair.first * pair.second, pair.first


@program(lambda: (collections.OrderedDict(b=leaf(3), a=leaf(3)),))
def an_ordered_dict_given(table):
    return collections.OrderedDict((name, value * 2) for name, value in reversed(table.items()))


@program(lambda: ({"x": [leaf(3), {"y": leaf(2)}], "k": 3},))
def containers_in_containers(tree):
    return {"out": [tree["x"][0] * tree["k"], (tree["x"][1]["y"].exp(),)]}


@program(lambda: (leaf(3),))
def no_output(a):
    a.sin()


@program(lambda: (leaf(3),))
def an_empty_list_returned(a):
    return [], {}, a.cos()


@program(lambda: (leaf(3),))
def one_value_in_many_places(a):
    b = a.exp()
    return b, [b, (b, b + 0)], {"b": b}


@program(lambda: (leaf(0, 3), plain(3)))
def an_empty_tensor(a, b):
    return a * b, a.sum(), torch.cat([a, b[None]])


@program(lambda: (leaf(()), leaf(3)))
def a_scalar_tensor(a, b):
    return a * b, a + 1, b.sum() * a


@program(lambda: (leaf(3), 2, 1.5, True, "relu", None))
def python_arguments(a, n, k, flag, name, nothing):
    return getattr(F, name)(a) * k**n if flag and nothing is None else a


@program(lambda: (leaf(3), torch.float64, torch.strided))
def dtypes_as_arguments(a, dtype, layout):
    return a.to(dtype) * 2, torch.zeros(2, dtype=dtype, layout=layout)


@program(lambda: (leaf(4, 3), slice(1, 3)))
def a_slice_as_an_argument(a, rows):
    return a[rows] * 2, a[rows, ..., None]


@program(lambda: (leaf(3), leaf(3)))
def an_output_that_is_an_argument_beside_its_write(a, b):
    c = a * 1
    c.add_(b)
    return a, c, b


@program(lambda: (plain(3), leaf(3)))
def an_argument_swapped_by_names(a, b):
    a, b = b, a
    return a * 2, b


@program(lambda: (leaf(2, 3),))
def a_tensor_unpacked(a):
    first, second = a
    return first * second, *a.unbind(1)


@program(lambda: (leaf(4, 4),))
def every_kind_of_view_returned(a):
    return a.t(), a.diagonal(), a.unfold(0, 2, 2), a.as_strided((2, 2), (4, 1)), a.view(2, 8), a.movedim(0, 1)


@program(lambda: (leaf(4, 4),))
def views_of_views_returned(a):
    b = a.exp()
    return b[1:], b[1:][0], b.t()[2], b.view(-1)[3:7]


@program(lambda: (leaf(4),))
def a_view_and_its_copy(a):
    b = a * 1
    view = b[1:]
    return view, view.clone(), view.contiguous(), view.reshape(-1), b.reshape(2, 2)


# ------------------------------------------------------------------------------------------------ writes


@program(lambda: (interior(4, 4),))
def a_row_added_to(a):
    a[1] += a[0]
    a[:, 2].mul_(3)
    return a.sum()


@program(lambda: (interior(4),))
def a_write_between_two_uses(a):
    before = a.sin()
    a.add_(1)
    after = a.sin()
    a.mul_(before)
    return before, after


@program(lambda: (plain(4, 4), leaf(4)))
def a_diagonal_written(a, b):
    a.diagonal().copy_(b)
    return a @ a


@program(lambda: (plain(4), leaf(4), torch.tensor([True, False, True, False])))
def written_where_a_mask_says(a, b, mask):
    a[mask] = b[mask] * 2
    a.masked_fill_(~mask, 0.5)
    return a * b


@program(lambda: (plain(6), leaf(2), torch.tensor([1, 4])))
def written_by_index_operators(a, b, index):
    a.index_add_(0, index, b)
    a.index_copy_(0, index + 1, b * 2)
    a.index_fill_(0, torch.tensor([0]), 7.0)
    return a.sum() * b


@program(lambda: (plain(3, 4), leaf(3, 2), torch.tensor([[0, 3], [1, 1], [2, 0]])))
def written_by_scatter_operators(a, b, index):
    a.scatter_add_(1, index, b)
    a.scatter_(1, index[:, :1], b[:, :1])
    return a.scatter_reduce(1, index, b, "amax")


@program(lambda: (interior(4),))
def a_sequence_of_in_place_operators(a):
    a.exp_().clamp_(0.1, 3).sqrt_().sub_(0.5).tanh_().neg_()
    return a.sum()


@program(lambda: (plain(4), leaf(4)))
def an_out_argument(a, b):
    torch.mul(b.detach(), 2, out=a)
    return a + b


@program(lambda: (plain(3), plain(3), leaf(3)))
def two_out_arguments(values, others, b):
    total = torch.stack([values, others])
    torch.add(values, b.detach(), out=others)
    return total, others * b


@program(lambda: (interior(3), interior(3)))
def arguments_swapped_by_writes(a, b):
    kept = a.clone()
    a.copy_(b)
    b.copy_(kept)
    return a * 2 + b


@program(lambda: (interior(2, 3),))
def a_broadcast_write(a):
    a.add_(a[0].clone())
    a[:] = a.mean(0)
    return a


@program(lambda: (torch.arange(3), leaf(3)))
def a_counter_written(counter, a):
    counter += 1
    return a * counter, counter.float().mean() * a


@program(lambda: (torch.zeros(3, dtype=torch.bool), leaf(3)))
def a_boolean_written(flags, a):
    flags |= a > 0
    flags.logical_not_()
    return a * flags


@program(lambda: ([plain(3), plain(3)], leaf(3)))
def foreach_writes(values, a):
    torch._foreach_mul_(values, 2.0)
    torch._foreach_add_(values, [a.detach(), a.detach() * 2])
    return sum(values) * a


@program(lambda: (interior(3),))
def a_write_that_is_undone(a):
    a.add_(1)
    a.sub_(1)
    return a * 2


@program(lambda: (plain(3), leaf(3)))
def a_write_of_itself(a, b):
    a.copy_(a)
    a.mul_(a)
    return a * b


@program(lambda: (leaf(3),))
def a_write_to_a_new_tensor_in_a_loop(a):
    total = torch.zeros(3)
    for step in range(4):
        total[step % 3] += a[step % 3] * step
    return total


@program(lambda: (leaf(3, 3),))
def a_triangular_fill(a):
    out = a.new_empty(3, 3)
    for row in range(3):
        for column in range(3):
            out[row, column] = a[row, column] if row >= column else 0.0
    return out @ a


# ------------------------------------------------------------------------------------------------ dtypes, modes, numbers


@program(lambda: (leaf(3),))
def through_several_dtypes(a):
    return a.double() * 2, a.half().float() + 1, a.bfloat16().sum(), a.to(torch.complex64).abs()


@program(lambda: (torch.randn(3, dtype=torch.float64, requires_grad=True), leaf(3)))
def dtypes_mixed(a, b):
    return a * b, b * 2.5, a + torch.arange(3), (b > 0) * a


@program(lambda: (torch.randn(3, dtype=torch.complex64, requires_grad=True),))
def complex_numbers(a):
    return a.real * a.imag, a.conj() * a, a.abs(), a.angle(), torch.view_as_real(a).sum()


@program(lambda: (torch.randn(4, 4, dtype=torch.complex64, requires_grad=True),))
def complex_matrices(a):
    return torch.linalg.eigvals(a @ a.mH + torch.eye(4)).abs().sum(), a.mH, a.conj().t()


@program(lambda: (leaf(8),))
def fourier(a):
    spectrum = torch.fft.rfft(a)
    return torch.fft.irfft(spectrum * spectrum.abs(), n=8), spectrum


@program(lambda: (leaf(5),))
def a_window_over_frames(a):
    return torch.stft(F.pad(a, (3, 3)), 4, 2, window=torch.hann_window(4), return_complex=True).abs()


@program(lambda: (leaf(3, 3),))
def autocast_off_inside_on(a):
    with torch.autocast("cpu", torch.bfloat16):
        low = a @ a
        with torch.autocast("cpu", enabled=False):
            high = a @ low.float()
        return low, high @ a


@program(lambda: (leaf(3),))
def values_without_gradients(a):
    return a.argmax(), a.sign(), a.round(), (a > 0).any(), a.detach().exp(), torch.isnan(a)


@program(lambda: (leaf(3),))
def special_functions(a):
    return torch.special.erfinv(a.tanh() * 0.9), torch.lgamma(a.abs() + 1), torch.digamma(a.abs() + 1), torch.sinc(a)


@program(lambda: (leaf(3, 4),))
def many_reductions(a):
    return a.std(), a.var(1), a.norm(dim=0), a.logsumexp(1), a.prod(1), a.amax((0, 1)), a.median(), a.quantile(0.3)


@program(lambda: (leaf(3, 4),))
def cumulative(a):
    return a.cumsum(1), a.cumprod(0), a.logcumsumexp(1), a.cummax(1).values, a.diff(dim=1)


@program(lambda: (leaf(6),))
def selections(a):
    return a.topk(3).values, a.sort(descending=True)[0], a.kthvalue(2)[0], a.unique_consecutive().sum(), a.msort()


@program(lambda: (leaf(3, 4),))
def rearrangements(a):
    return a.flip(0), a.roll(1, 1), a.rot90(), a.tile(2), a.repeat_interleave(2, 0), a.tril()


@program(lambda: (leaf(3, 3), leaf(3, 3)))
def products_of_matrices(a, b):
    return (
        torch.kron(a, b),
        torch.outer(a[0], b[0]),
        torch.linalg.cross(a, b),
        torch.cdist(a, b),
        torch.linalg.multi_dot([a, b, a]),
    )


@program(lambda: (leaf(3, 3),))
def decompositions_of_matrices(a):
    spd = a @ a.T + 3 * torch.eye(3)
    q, r = torch.linalg.qr(a + torch.eye(3) * 4)
    return (
        torch.linalg.cholesky(spd),
        r.abs(),
        torch.logdet(spd),
        torch.linalg.solve(spd, a),
        torch.linalg.pinv(spd),
        q.abs(),
    )
