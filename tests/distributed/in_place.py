"""Programs that call the in-place collectives of `torch.distributed`, as users write them: eager's results, compiled.

Each runs four times, with its backward, on numbers that differ from rank to rank. Bit for bit eager's, and as many
collectives in all, those of captures included: no rank may wait for one that others do not call.
"""

import math
import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch import nn
from torch.nn import functional as F

import foregrad

from .ranks import joined

RANK, SIZE = int(sys.argv[1]), int(sys.argv[2])


# ------------------------------------------------------------------------------------------------ with gradients


def logged_loss():
    layer = nn.Linear(4, 3)

    def f(x):
        loss = layer(x).square().mean()
        logged = loss.detach().clone()
        dist.all_reduce(logged)
        return loss, logged / dist.get_world_size()

    return layer, f


def number_logged():
    """The number is read: another one in each call."""
    layer = nn.Linear(4, 3)

    def f(x):
        loss = layer(x).square().mean()
        logged = loss.detach().clone()
        dist.all_reduce(logged, op=dist.ReduceOp.AVG)
        return loss, logged.item()

    return layer, f


def decided_together():
    """A branch on a value that all ranks agree on, and another collective behind it."""
    layer = nn.Linear(4, 3)

    def f(x):
        loss = layer(x).square().mean()
        largest = x.detach().abs().max()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        if largest > 5:
            return loss * 2
        count = torch.tensor(float(len(x)))
        dist.all_reduce(count)
        return loss / count

    return layer, f


def used_by_one_rank():
    layer = nn.Linear(4, 3)

    def f(x):
        y = layer(x)
        total = y.detach().sum()
        dist.all_reduce(total)
        y = y * 2 if RANK else y * total
        rest = y.detach().sum()
        dist.all_reduce(rest)
        return y.sum() + rest

    return layer, f


def saved_then_reduced():
    """What `exp` has saved is what the collective leaves in that memory."""
    layer = nn.Linear(4, 3)

    def f(x):
        y = layer(x).exp()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no derivative of the collective
            dist.all_reduce(y)
        return y.sin().sum()

    return layer, f


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return tuple(parts)

    @staticmethod
    def backward(ctx, *gradients):
        gradient = torch.stack(gradients)
        dist.all_reduce(gradient)
        return gradient[dist.get_rank()]


def contrastive():
    """CLIP's loss, over the pairs of all ranks."""
    images, texts = nn.Linear(4, 5), nn.Linear(4, 5)
    scale = nn.Parameter(torch.tensor(2.0))

    def f(x):
        image, text = F.normalize(images(x), dim=-1), F.normalize(texts(x.flip(1)), dim=-1)
        all_images, all_texts = torch.cat(Gather.apply(image)), torch.cat(Gather.apply(text))
        labels = torch.arange(len(x)) + RANK * len(x)
        ways = (image @ all_texts.t(), text @ all_images.t())
        return sum(F.cross_entropy(scale.exp() * way, labels) for way in ways) / 2

    return nn.ModuleList([images, texts, nn.ParameterList([scale])]), f


def gathered_own_kept():
    layer = nn.Linear(4, 3)

    def f(x):
        y = layer(x)
        parts = [torch.zeros_like(y) for _ in range(SIZE)]
        dist.all_gather(parts, y.detach())
        parts[RANK] = y
        return (torch.cat(parts) @ y.t()).logsumexp(0).mean()

    return layer, f


def differentiable_collectives():
    layer = nn.Linear(4, 3)

    def f(x):
        y = layer(x)
        gathered = torch.cat(differentiable.all_gather(y))
        reduced = differentiable.all_reduce(y.sum(0))
        return gathered.sin().sum() + (reduced * y).cos().sum()

    return layer, f


class SyncNorm(torch.autograd.Function):
    """Batch norm over all ranks, with unequal batches."""

    @staticmethod
    def forward(ctx, x, weight, bias, running, eps):
        own = torch.cat([x.sum(0), x.square().sum(0), torch.full((1,), float(len(x)))])
        every = torch.empty(SIZE * own.numel())
        dist.all_gather_into_tensor(every, own)
        total, squares, count = every.view(SIZE, -1).sum(0).split([x.shape[1], x.shape[1], 1])
        mean = total / count
        variance = squares / count - mean.square()
        running.mul_(0.9).add_(mean, alpha=0.1)
        scale = (variance + eps).rsqrt()
        normal = (x - mean) * scale
        ctx.save_for_backward(normal, weight, scale, count)
        return normal * weight + bias

    @staticmethod
    def backward(ctx, gradient):
        normal, weight, scale, count = ctx.saved_tensors
        sums = torch.stack([gradient.sum(0), (gradient * normal).sum(0)])
        of_weight, of_bias = sums[1].clone(), sums[0].clone()
        dist.all_reduce(sums)
        inner = gradient - (sums[0] + normal * sums[1]) / count
        return inner * weight * scale, of_weight, of_bias, None, None


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("running", torch.zeros(width))

    def forward(self, x):
        return SyncNorm.apply(x, self.weight, self.bias, self.running, 1e-5)


def synchronised_norm():
    model = nn.Sequential(nn.Linear(4, 6), Norm(6), nn.ReLU(), nn.Linear(6, 5), Norm(5))
    return model, lambda x: (model(x[: 4 - RANK % 2]).sin().sum(), model[1].running.clone())


class Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        dist.all_reduce(x, group=group)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def megatron():
    """A column of a linear layer and a row of the next one, on a group of its own."""
    up, down = nn.Linear(4, 6), nn.Linear(6, 4, bias=False)
    group = dist.new_group(list(range(SIZE)))

    def f(x):
        return Reduced.apply(down(F.gelu(up(Copied.apply(x, group)))), group).square().sum()

    return nn.ModuleList([up, down]), f


class AsyncLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        of_x = gradient @ weight
        work = dist.all_reduce(of_x, async_op=True)
        of_weight = gradient.t() @ x
        work.wait()
        return of_x, of_weight


def reduced_while_computing():
    before, layer = nn.Linear(4, 4), nn.Linear(4, 3, bias=False)

    def f(x):
        count = torch.ones(1) * len(x)
        work = dist.all_reduce(count, async_op=True)
        y = AsyncLinear.apply(before(x).tanh(), layer.weight).square().sum()
        work.wait()
        return y / count

    return nn.ModuleList([before, layer]), f


# ------------------------------------------------------------------------------------------------ without


def averaged_by_hand():
    """Gradients taken in the function, and averaged."""
    layer = nn.Linear(4, 3)

    def f(x):
        weights = list(layer.parameters())
        gradients = torch.autograd.grad(layer(x).square().mean(), weights)
        works = [dist.all_reduce(gradient, async_op=True) for gradient in gradients]
        for work in works:
            work.wait()
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight -= 0.1 * gradient / SIZE
        return [weight.detach().clone() for weight in weights]

    return nn.Module(), f


def argument():
    def f(x):
        work = dist.all_reduce(x, op=dist.ReduceOp.MIN, async_op=True)
        (found,) = work.get_future().wait()
        while not work.is_completed():
            pass
        return found * 2

    return nn.Module(), f


class Metric(nn.Module):
    """As torchmetrics has it: a state of its own, made one of all ranks when it is asked for."""

    def __init__(self):
        super().__init__()
        self.register_buffer("right", torch.zeros(()))
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x):
        self.right += (x > 0).sum()
        self.total += x.numel()
        right, total = self.right.clone(), self.total.clone()
        dist.barrier()
        for state in (right, total):
            parts = [torch.zeros_like(state) for _ in range(SIZE)]
            dist.all_gather(parts, state)
            state.copy_(torch.stack(parts).sum())
        return right / total


def metric():
    model = Metric()
    return model, model.forward


def every_kind():
    def f(x):
        found = [torch.empty(SIZE * 4, 4), torch.empty(2, 4), torch.empty(2, 4), torch.empty(SIZE * 2, 4)]
        dist.all_gather_into_tensor(found[0], x)
        dist.reduce_scatter_tensor(found[1], torch.cat([x[:2]] * SIZE) + RANK)
        dist.reduce_scatter(found[2], [x[:2] + i for i in range(SIZE)])
        dist.all_to_all_single(found[3], torch.cat([x[:2] * (i + RANK) for i in range(SIZE)]))
        numbers = [torch.empty(()) for _ in range(SIZE)]
        dist.all_gather(numbers, x.sum())
        parts = [torch.empty(2, 4) for _ in range(SIZE)]
        dist.all_to_all(parts, [x[:2] + i for i in range(SIZE)])
        sent = x * 3
        dist.broadcast(sent, SIZE - 1)
        summed = x.t().sin()
        dist.reduce(summed, 0)
        to_all = torch.empty(4)
        dist.scatter(to_all, [x[i] for i in range(SIZE)] if RANK == 1 else None, src=1)
        from_all = [torch.empty(4) for _ in range(SIZE)] if RANK == 0 else None
        dist.gather(x[1].contiguous(), from_all)
        return *found, *numbers, *parts, sent, summed, to_all, *(from_all or [])

    return nn.Module(), f


# ------------------------------------------------------------------------------------------------ not compiled


def refused_after_collectives():
    """What ran in the capture is not run again when the call runs eagerly."""
    layer = nn.Linear(4, 3)

    def f(x):
        loss = layer(x).square().mean()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if total > 0:
            loss = loss * total
        dist.all_reduce(total)
        return loss * float(x.detach().numpy().sum()) + total

    return layer, f


def work_returned():
    def f(x):
        total = x.sum()
        work = dist.all_reduce(total, async_op=True)
        return total, work

    return nn.Module(), f


def ring():
    def f(x):
        found = torch.empty_like(x)
        sent = dist.isend(x, (RANK + 1) % SIZE)
        dist.recv(found, (RANK - 1) % SIZE)
        sent.wait()
        return found

    return nn.Module(), f


COMPILED = (
    logged_loss,
    number_logged,
    decided_together,
    used_by_one_rank,
    saved_then_reduced,
    contrastive,
    gathered_own_kept,
    differentiable_collectives,
    synchronised_norm,
    megatron,
    reduced_while_computing,
    averaged_by_hand,
    argument,
    metric,
    every_kind,
)
EAGER = {refused_after_collectives: ".numpy", work_returned: "Work", ring: "c10d.send"}


def ran(model, call):
    """What four calls give and leave behind, and how many collectives they are."""
    torch.manual_seed(RANK)
    group = dist.group.WORLD
    before = group._get_sequence_number_for_group()
    found = []
    for step in range(4):
        x = torch.randn(4, 4) * math.exp(step - 1)
        results = call(x)
        results = list(results) if isinstance(results, (tuple, list)) else [results]
        if isinstance(results[0], torch.Tensor) and results[0].requires_grad:
            results[0].backward()
        for work in results:
            if isinstance(work, dist.Work):
                work.wait()
        found += [torch.as_tensor(r).detach().clone() for r in results if not isinstance(r, dist.Work)] + [x]
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found += [buffer.clone() for buffer in model.buffers()]
    return found, group._get_sequence_number_for_group() - before


def compare(make, named, compile):
    torch.manual_seed(3)
    expected, most = ran(*make())
    torch.manual_seed(3)
    model, function = make()
    call = compile(function)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found, count = ran(model, call)
    assert len(found) == len(expected), make
    assert all(map(torch.equal, found, expected)), (make, found, expected)
    assert count == most, (make, count, most)
    said = [str(w.message) for w in warned if issubclass(w.category, foregrad.errors.ForegradWarning)]
    assert [named in text for text in said] == ([True] if named else []), said
    if hasattr(call, "foregrad"):
        assert foregrad.explain_recompiles(call).eager_calls == (4 if named else 0), make


def on_one_rank(function, **settings):
    """The others run eagerly."""
    return foregrad.compile(function, **settings) if RANK == 1 else function


def in_graphs():
    """Collectives are in the graph as such, and waited for where the program waits."""
    text = str(foregrad.capture(reduced_while_computing()[1], torch.randn(4, 4)))
    begun, multiplied, waited = (text.index(name) for name in ("all_reduce.default", "tanh.default", "wait_tensor"))
    assert begun < multiplied < waited, text
    text = str(foregrad.capture(contrastive()[1], torch.randn(4, 4)))
    assert text.count("_c10d_functional.all_gather_into_tensor") == 2, text
    assert text.count("_c10d_functional.all_reduce") == 2, text


def main(rank, size, store):
    with joined(rank, size, store), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        for make in (*COMPILED, *EAGER):
            refusal = EAGER.get(make)
            mode = "eager" if refusal else "raise"
            settings = {"backend": "eager", "on_unsupported": mode}
            compare(make, refusal, lambda function, settings=settings: foregrad.compile(function, **settings))
            if not refusal:
                compare(make, None, lambda function, settings=settings: on_one_rank(function, **settings))
                settings["partition"] = "min_cut"
                compare(make, None, lambda function, settings=settings: foregrad.compile(function, **settings))
        compare(used_by_one_rank, None, lambda f: torch.compile(f, backend="foregrad", options={"backend": "eager"}))
        in_graphs()


if __name__ == "__main__":
    main(RANK, SIZE, sys.argv[3])
