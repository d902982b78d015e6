"""Practices round training, as programs of users: each is run with `wrap` as it is, and as `foregrad.compile`.

A practice gives what is to be equal: losses, parameters, counters. `EAGER` are those of which calls may run eagerly,
with a warning that matches. `CLOSE` are those with second derivatives, whose sums are added in another order.
"""

# ruff: noqa: NPY002 - programs of users draw from the module itself

from __future__ import annotations

import copy
import functools
import io
import itertools
import logging
import pickle
import random
from collections import OrderedDict, deque

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim import lr_scheduler, swa_utils
from torch.utils.checkpoint import checkpoint

EAGER: dict[str, str] = {}
CLOSE = {"curvature by two backwards"}
PRACTICES = {}


def practice(*, eager=None):
    def register(function):
        name = function.__name__.replace("_", " ")
        PRACTICES[name] = function
        if eager is not None:
            EAGER[name] = eager
        return function

    return register


def net(*more):
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), *more, nn.Linear(6, 2))


def batches(count=4, rows=3):
    torch.manual_seed(7)
    return [(torch.randn(rows, 4), torch.randint(0, 2, (rows,))) for _ in range(count)]


def tensors(module):
    return [tensor.detach().clone() for tensor in module.state_dict().values() if isinstance(tensor, torch.Tensor)]


def train(model, optimizer, call=None, data=None, after=lambda: None):
    """The usual loop; the losses."""
    losses = []
    for x, y in data or batches():
        optimizer.zero_grad()
        loss = F.cross_entropy((call or model)(x), y)
        loss.backward()
        optimizer.step()
        after()
        losses.append(loss.detach())
    return losses


def sgd(model, **settings):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, **settings})


@practice()
def plain_loop(wrap):
    model = net()
    return [*train(model, sgd(model), wrap(model)), *tensors(model)]


@practice()
def loss_inside(wrap):
    model = net()
    optimizer = sgd(model, momentum=0.9)
    loss_of = wrap(lambda x, y: F.cross_entropy(model(x), y))
    losses = []
    for x, y in batches():
        optimizer.zero_grad()
        loss = loss_of(x, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [losses, *tensors(model)]


@practice()
def autocast_outside(wrap):
    model = net()
    call = wrap(model)

    def cast(x):
        with torch.autocast("cpu", torch.bfloat16):
            return call(x).float()

    return [*train(model, sgd(model), cast), *tensors(model)]


@practice()
def autocast_inside(wrap):
    model = net()

    def forward(x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float()

    return [*train(model, sgd(model), wrap(forward)), *tensors(model)]


@practice()
def gradient_scaler(wrap):
    model = net()
    call, optimizer, scaler = wrap(model), sgd(model), torch.amp.GradScaler("cpu", init_scale=64.0)
    found = []
    for x, y in batches():
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(call(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append(scaler.get_scale())
    return [found, *tensors(model)]


@practice()
def clipping_by_norm(wrap):
    model = net()
    call, optimizer, norms = wrap(model), sgd(model), []
    for x, y in batches():
        optimizer.zero_grad()
        F.cross_entropy(call(x), y).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
    return [*norms, *tensors(model)]


@practice()
def clipping_by_value(wrap):
    model = net()
    call, optimizer = wrap(model), sgd(model)
    for x, y in batches():
        optimizer.zero_grad()
        F.cross_entropy(call(x), y).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
    return tensors(model)


@practice()
def accumulation(wrap):
    model = net()
    call, optimizer = wrap(model), sgd(model)
    for number, (x, y) in enumerate(batches(6)):
        (F.cross_entropy(call(x), y) / 3).backward()
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=number % 2 == 0)
    return tensors(model)


@practice()
def moving_average_by_hand(wrap):
    model = net()
    average = copy.deepcopy(model)

    @torch.no_grad()
    def update():
        for mean, now in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(now, 0.1)

    call = wrap(model)
    return [*train(model, sgd(model), call, after=update), *tensors(average), wrap(average)(batches(1)[0][0]).detach()]


@practice()
def averaged_model(wrap):
    model = net()
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    train(model, sgd(model), wrap(model), after=lambda: average.update_parameters(model))
    return [*tensors(average), wrap(average)(batches(1)[0][0]).detach()]


@practice()
def stochastic_weight_averaging(wrap):
    model = net(nn.BatchNorm1d(6))
    call, optimizer = wrap(model), sgd(model)
    average, schedule = swa_utils.AveragedModel(model), swa_utils.SWALR(optimizer, swa_lr=0.05)
    train(model, optimizer, call, after=lambda: (average.update_parameters(model), schedule.step()))
    swa_utils.update_bn([x for x, _ in batches()], average)
    return tensors(average)


@practice()
def scheduler_of_steps(wrap):
    model = net()
    optimizer = sgd(model)
    schedule = lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=8)
    rates = []
    train(model, optimizer, wrap(model), after=lambda: (schedule.step(), rates.extend(schedule.get_last_lr())))
    return [rates, *tensors(model)]


@practice()
def scheduler_on_a_plateau(wrap):
    model = net()
    optimizer = sgd(model)
    schedule = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    call = wrap(model)
    for _ in range(3):
        schedule.step(sum(train(model, optimizer, call)))
    return [optimizer.param_groups[0]["lr"], *tensors(model)]


@practice()
def step_with_its_optimizer_inside(wrap):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    call = wrap(step)
    return [*(call(x, y) for x, y in batches()), *tensors(model)]


@practice()
def lbfgs(wrap):
    model = net()
    call, (x, y) = wrap(model), batches(1)[0]
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(call(x), y)
        loss.backward()
        return loss

    return [optimizer.step(closure).detach(), *tensors(model)]


@practice()
def gradients_by_hand(wrap):
    model = net()
    call, parameters = wrap(model), list(model.parameters())
    for x, y in batches():
        for p, g in zip(parameters, torch.autograd.grad(F.cross_entropy(call(x), y), parameters), strict=True):
            p.data.sub_(g, alpha=0.1)
    return tensors(model)


@practice()
def hook_on_a_parameter(wrap):
    model = net()
    seen = []
    model[0].weight.register_hook(lambda grad: seen.append(grad.norm()) or grad * 0.5)
    train(model, sgd(model), wrap(model))
    return [*seen, *tensors(model)]


@practice()
def hook_after_accumulation(wrap):
    model = net()
    for parameter in model.parameters():

        def step(p):
            with torch.no_grad():
                p.sub_(p.grad, alpha=0.1)
            p.grad = None

        parameter.register_post_accumulate_grad_hook(step)
    call = wrap(model)
    for x, y in batches():
        F.cross_entropy(call(x), y).backward()
    return tensors(model)


@practice()
def forward_hook_that_collects(wrap):
    model = net()
    kept = {}
    model[1].register_forward_hook(lambda module, args, out: kept.__setitem__("hidden", out.detach()))
    losses = train(model, sgd(model), wrap(model))
    return [*losses, kept["hidden"]]


@practice()
def forward_hook_that_changes(wrap):
    model = net()
    model[1].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model[1].register_forward_hook(lambda module, args, out: out + 1)
    return [*train(model, sgd(model), wrap(model)), *tensors(model)]


@practice()
def hook_that_is_removed(wrap):
    model = net()
    call = wrap(model)
    handle = model[1].register_forward_hook(lambda module, args, out: out * 3)
    first = train(model, sgd(model), call)
    handle.remove()
    return [*first, *train(model, sgd(model), call)]


@practice()
def full_backward_hook_that_counts(wrap):
    model = net()
    norms = []
    model[0].register_full_backward_hook(lambda module, grads, out: norms.append(out[0].norm()))
    train(model, sgd(model), wrap(model))
    return [*norms, *tensors(model)]


@practice()
def tensor_hook_inside(wrap):
    model = net()

    def forward(x):
        hidden = model[1](model[0](x))
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        return model[2](hidden)

    return [*train(model, sgd(model), wrap(forward)), *tensors(model)]


@practice()
def weight_norm(wrap):
    model = net()
    parametrizations.weight_norm(model[0])
    return [*train(model, sgd(model), wrap(model)), *tensors(model)]


@practice()
def spectral_norm(wrap):
    model = net()
    parametrizations.spectral_norm(model[0])
    return [*train(model, sgd(model), wrap(model)), *tensors(model)]


@practice()
def orthogonal(wrap):
    model = net()
    parametrizations.orthogonal(model[0])
    return [*train(model, sgd(model), wrap(model)), *tensors(model)]


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).transpose(-1, -2)


@practice()
def parametrization_of_ones_own(wrap):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    call = wrap(model)
    with parametrize.cached():
        cached = call(batches(1)[0][0]).detach()
    return [cached, *train(model, sgd(model), call), *tensors(model)]


@practice()
def pruning(wrap):
    from torch.nn.utils import prune

    model = net()
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    losses = train(model, sgd(model), wrap(model))
    prune.remove(model[0], "weight")
    return [*losses, *tensors(model), wrap(model)(batches(1)[0][0]).detach()]


@practice()
def freezing_and_thawing(wrap):
    model = net()
    call, found = wrap(model), []
    for is_free in (True, False, True):
        model[0].requires_grad_(is_free)
        found += train(model, sgd(model), call)
    return [*found, *tensors(model)]


@practice()
def parameter_groups(wrap):
    model = net()
    groups = [{"params": model[0].parameters(), "lr": 0.01}, {"params": model[2].parameters(), "weight_decay": 0.1}]
    return [*train(model, torch.optim.Adam(groups, lr=0.1), wrap(model)), *tensors(model)]


@practice()
def tied_weights(wrap):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(4, 6), nn.Linear(6, 4, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(self.embed(x.abs().long().clamp(max=3)).mean(1))

    model = Tied()
    return [*train(model, sgd(model), wrap(model)), *tensors(model)]


@practice()
def saved_and_loaded_in_between(wrap):
    model = net()
    call, optimizer = wrap(model), torch.optim.Adam(model.parameters())
    file = io.BytesIO()
    train(model, optimizer, call)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, optimizer, call)
    file.seek(0)
    kept = torch.load(file, weights_only=True)
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    return [*train(model, optimizer, call), *tensors(model)]


@practice()
def state_assigned(wrap):
    model, other = net(), net()
    call = wrap(model)
    before = train(model, sgd(model), call)
    model.load_state_dict({name: t.clone() for name, t in other.state_dict().items()}, assign=True)
    return [*before, *train(model, sgd(model), call), *tensors(model)]


@practice()
def a_copy_of_what_is_compiled(wrap):
    model = net()
    call = wrap(model)
    train(model, sgd(model), call)
    other = copy.deepcopy(call)
    train(other, sgd(other))
    return [*tensors(model), *tensors(other)]


@practice()
def pickled(wrap):
    model = net()
    train(model, sgd(model), wrap(model))
    other = pickle.loads(pickle.dumps(model))
    return [*train(other, sgd(other), wrap(other)), *tensors(other)]


@practice()
def profiled(wrap):
    from torch.profiler import ProfilerActivity, profile, record_function

    model = net()

    def forward(x):
        with record_function("forward"):
            return model(x)

    call = wrap(forward)
    with profile(activities=[ProfilerActivity.CPU]):
        losses = train(model, sgd(model), call)
    return [*losses, *tensors(model)]


@practice()
def checkpointed(wrap):
    model = net(nn.Dropout(0.5))

    def forward(x):
        return model[3](checkpoint(lambda h: model[2](model[1](model[0](h))), x, use_reentrant=False))

    return [*train(model, sgd(model), wrap(forward)), *tensors(model)]


@practice()
def functional_ensemble(wrap):
    models = [net() for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")

    def one(p, b, x):
        return torch.func.functional_call(base, (p, b), (x,))

    call = wrap(lambda p, b, x: torch.func.vmap(one, (0, 0, None))(p, b, x))
    out = call(parameters, buffers, batches(1)[0][0])
    out.sum().backward()
    return [out.detach(), *(p.grad for p in parameters.values())]


@practice()
def gradients_for_each_sample(wrap):
    model = net()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    call = wrap(lambda p, x, y: F.cross_entropy(torch.func.functional_call(model, p, (x[None],)), y[None]))
    x, y = batches(1)[0]
    return list(torch.func.vmap(torch.func.grad(call), (None, 0, 0))(parameters, x, y).values())


@practice()
def data_loader_with_workers(wrap):
    data = torch.utils.data.TensorDataset(*(torch.cat(part) for part in zip(*batches(3), strict=True)))
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=False, drop_last=False)
    model = net()
    return [*train(model, sgd(model), wrap(model), data=list(loader)), *tensors(model)]


@practice()
def training_and_evaluation(wrap):
    model = net(nn.BatchNorm1d(6), nn.Dropout(0.3))
    call, optimizer, found = wrap(model), sgd(model), []
    for _ in range(3):
        model.train()
        found += train(model, optimizer, call)
        model.eval()
        with torch.no_grad():
            found.append(call(batches(1)[0][0]))
    return [*found, *tensors(model)]


@practice()
def inference_mode(wrap):
    model = net()
    call = wrap(model)
    losses = train(model, sgd(model), call)
    with torch.inference_mode():
        out = call(batches(1)[0][0])
    return [*losses, out.clone(), *train(model, sgd(model), call)]


@practice()
def gradient_penalty(wrap):
    model = net()
    call, optimizer = wrap(model), sgd(model)
    for x, _ in batches():
        x.requires_grad_()
        (grad,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
        optimizer.zero_grad()
        ((grad.norm(dim=1) - 1) ** 2).mean().backward()
        optimizer.step()
    return tensors(model)


@practice()
def adversarial_examples(wrap):
    model = net()
    call, found = wrap(model), []
    for x, y in batches():
        x.requires_grad_()
        F.cross_entropy(call(x), y).backward()
        found.append(call((x + 0.1 * x.grad.sign()).detach()).detach())
    return found


@practice()
def two_optimizers_of_a_pair(wrap):
    generator, critic = net(), nn.Linear(2, 1)
    make, judge = wrap(generator), wrap(critic)
    first, second = sgd(generator), sgd(critic)
    for x, _ in batches():
        second.zero_grad()
        (judge(make(x).detach()).mean() - judge(torch.ones(3, 2)).mean()).backward()
        second.step()
        first.zero_grad()
        (-judge(make(x)).mean()).backward()
        first.step()
    return [*tensors(generator), *tensors(critic)]


@practice()
def a_counter_and_the_last_loss(wrap):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.steps, self.last = net(), 0, None

        def forward(self, x):
            self.steps += 1
            out = self.net(x) * min(1.0, self.steps / 3)
            self.last = out.mean().item()
            return out

    model = Counting()
    losses = train(model, sgd(model), wrap(model))
    return [*losses, model.steps, model.last]


@practice()
def warm_up_read_from_an_attribute(wrap):
    class Warm(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.temperature = net(), 1.0

        def forward(self, x):
            return self.net(x) / self.temperature

    model = Warm()
    call, found = wrap(model), []
    for number in range(5):
        model.temperature = 1.0 + number / 7
        found += train(model, sgd(model), call, batches(1))
    return found


@practice()
def losses_in_a_deque(wrap):
    model = net()
    recent = deque(maxlen=3)

    def loss_of(x, y):
        loss = F.cross_entropy(model(x), y)
        recent.append(loss.detach())
        return loss

    call = wrap(loss_of)
    for x, y in batches(5):
        call(x, y).backward()
    return [*recent, *(p.grad for p in model.parameters())]


@practice()
def mixed_batches(wrap):
    model = net()

    def loss_of(x, y):
        share, order = np.random.beta(0.4, 0.4), torch.from_numpy(np.random.permutation(x.shape[0]))
        out = model(share * x + (1 - share) * x[order])
        return share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[order])

    call = wrap(loss_of)
    losses = [call(x, y) for x, y in batches()]
    sum(losses).backward()
    return [*(loss.detach() for loss in losses), *(p.grad for p in model.parameters())]


@practice()
def layers_left_out_at_random(wrap):
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(x):
        for layer in layers:
            if random.random() < 0.7:
                x = x + layer(x).relu()
        return x

    return [*train(layers, sgd(layers), wrap(forward)), *tensors(layers)]


@practice()
def seeded_again(wrap):
    model = net(nn.Dropout(0.5))
    call, found = wrap(model), []
    for _ in range(2):
        torch.manual_seed(5)
        found += [call(batches(1)[0][0]).detach() for _ in range(2)]
    return found


@practice()
def deterministic_algorithms(wrap):
    model = net()
    torch.use_deterministic_algorithms(True)
    try:
        return [*train(model, sgd(model), wrap(model)), *tensors(model)]
    finally:
        torch.use_deterministic_algorithms(False)


@practice()
def anomaly_mode(wrap):
    model = net()
    call = wrap(model)
    with torch.autograd.detect_anomaly(check_nan=True):
        return [*train(model, sgd(model), call), *tensors(model)]


@practice()
def half_the_model_in_float64(wrap):
    model = net().double()
    data = [(x.double(), y) for x, y in batches()]
    losses = train(model, sgd(model), wrap(model), data)
    model.float()
    return [*losses, *train(model, sgd(model), wrap(model))]


@practice()
def moved_and_back(wrap):
    model = net()
    call = wrap(model)
    first = train(model, sgd(model), call)
    model.to(torch.bfloat16).to(torch.float32)
    return [*first, *train(model, sgd(model), call), *tensors(model)]


@practice()
def another_head(wrap):
    model = net()
    call = wrap(model)
    train(model, sgd(model), call)
    model[2] = nn.Linear(6, 3)
    return [*train(model, sgd(model), call), *tensors(model)]


@practice()
def low_rank_adapters(wrap):
    class Adapted(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base.requires_grad_(False)
            self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 6, bias=False)

        def forward(self, x):
            return self.base(x) + self.up(self.down(x))

    model = net()
    model[0] = Adapted(model[0])
    return [*train(model, sgd(model), wrap(model)), *tensors(model)]


@practice()
def batches_of_other_sizes(wrap):
    model = net()
    data = list(itertools.chain.from_iterable(batches(1, rows) for rows in (3, 5, 2, 7, 3)))
    return [*train(model, sgd(model), wrap(model), data), *tensors(model)]


@practice()
def dicts_in_and_out(wrap):
    model = net()

    def forward(batch):
        out = model(batch["x"])
        return OrderedDict(loss=F.cross_entropy(out, batch["y"]), logits=out)

    call = wrap(forward)
    found = []
    for x, y in batches():
        out = call({"x": x, "y": y})
        out["loss"].backward()
        found += [out["loss"].detach(), out["logits"].detach()]
    return [*found, *(p.grad for p in model.parameters())]


@practice()
def saved_tensors_on_their_way(wrap):
    model = net()
    call, packed = wrap(model), []

    def pack(tensor):
        packed.append(tuple(tensor.shape))
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        losses = train(model, sgd(model), call)
    return [*losses, bool(packed), *tensors(model)]


@practice()
def logging_in_each_step(wrap):
    model = net()
    log = logging.getLogger("practices")

    def forward(x):
        out = model(x)
        log.warning("mean %s", tuple(out.shape))
        return out

    return [*train(model, sgd(model), wrap(forward)), *tensors(model)]


@practice()
def no_decay_and_foreach(wrap):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True, amsgrad=True)
    return [*train(model, optimizer, wrap(model)), *tensors(model)]


@practice()
def partial_application(wrap):
    model = net()
    call = wrap(functools.partial(lambda scale, x: model(x) * scale, 2.0))
    return [*train(model, sgd(model), call), *tensors(model)]


@practice()
def label_smoothing_and_weights(wrap):
    model = net()
    loss_of = wrap(nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0]), label_smoothing=0.1))
    losses = [loss_of(model(x), y) for x, y in batches()]
    sum(losses).backward()
    return [*(loss.detach() for loss in losses), *(p.grad for p in model.parameters())]


@practice()
def distillation(wrap):
    teacher, student = net().eval().requires_grad_(False), net()

    def loss_of(x):
        with torch.no_grad():
            aim = teacher(x).softmax(-1)
        return F.kl_div(student(x).log_softmax(-1), aim, reduction="batchmean")

    call = wrap(loss_of)
    for x, _ in batches():
        call(x).backward()
    return [p.grad for p in student.parameters()]


@practice()
def contrastive_queue(wrap):
    class Queue(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()
            self.register_buffer("keys", torch.zeros(6, 2))
            self.register_buffer("at", torch.zeros((), dtype=torch.long))

        def forward(self, x):
            out = self.net(x)
            with torch.no_grad():
                self.keys.index_copy_(0, (torch.arange(x.shape[0]) + self.at) % 6, out.detach())
                self.at.add_(x.shape[0]).remainder_(6)
            return out @ self.keys.t()

    model = Queue()
    return [*train(model, sgd(model), wrap(model)), *tensors(model)]


@practice()
def lazy_layers(wrap):
    model = nn.Sequential(nn.LazyLinear(6), nn.Tanh(), nn.LazyLinear(2))
    call = wrap(model)
    call(batches(1)[0][0])
    return [*train(model, sgd(model), call), *tensors(model)]


@practice()
def early_stopping(wrap):
    model = net()
    call, best, found = wrap(model), None, []
    for _ in range(4):
        loss = sum(train(model, sgd(model, lr=1.0), call))
        if best is None or loss < best[0]:
            best = loss, copy.deepcopy(model.state_dict())
        found.append(loss)
    model.load_state_dict(best[1])
    return [*found, *tensors(model), call(batches(1)[0][0]).detach()]


@practice()
def curvature_by_two_backwards(wrap):
    model = net()
    call, parameters = wrap(model), list(model.parameters())
    x, y = batches(1)[0]
    grads = torch.autograd.grad(F.cross_entropy(call(x), y), parameters, create_graph=True)
    return list(torch.autograd.grad(sum((g * torch.ones_like(g)).sum() for g in grads), parameters))


@practice()
def retained_gradients(wrap):
    model = net()
    call = wrap(lambda x: model[1](model[0](x)))
    hidden = call(batches(1)[0][0])
    hidden.retain_grad()
    loss = model[2](hidden).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return [hidden.grad, *(p.grad for p in model.parameters())]


@practice()
def embedding_with_padding(wrap):
    table = nn.Embedding(5, 3, padding_idx=0)
    call = wrap(lambda i: table(i).sum(1))
    for _ in range(2):
        call(torch.tensor([[0, 1, 2], [3, 0, 0]])).pow(2).sum().backward()
    return [table.weight.grad]


@practice()
def packed_sequences(wrap):
    layer = nn.GRU(4, 3, batch_first=True)
    lengths = torch.tensor([3, 2])

    def forward(x):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(layer(packed)[0], batch_first=True)[0]

    call = wrap(forward)
    torch.manual_seed(1)
    out = call(torch.randn(2, 3, 4))
    out.sum().backward()
    return [out.detach(), *(p.grad for p in layer.parameters())]
