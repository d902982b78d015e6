"""Training steps as people write them: each program trains for some calls and gives all that can be seen of it."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

PROGRAMS = {}  # by name: the program, and how many graphs it may take


def program(graphs):
    def note(function):
        PROGRAMS[function.__name__] = function, graphs
        return function

    return note


def network():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def batches(count):
    return [(torch.randn(4, 8), torch.randint(0, 3, (4,))) for _ in range(count)]


def seen(*modules):
    """Parameters, buffers, and what is in `.grad`."""
    values = [value.detach().clone() for module in modules for value in module.state_dict().values()]
    return values + [None if p.grad is None else p.grad.clone() for m in modules for p in m.parameters()]


def train(wrap, step, count, *modules, each=lambda index: None):
    """What `count` calls of `step` give, and what they leave in the modules after each."""
    call = wrap(step)
    found = []
    for index, batch in enumerate(batches(count)):
        each(index)
        result = call(*batch)
        found.append([result.detach().clone() if isinstance(result, torch.Tensor) else result, seen(*modules)])
    return found, call


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


def with_optimizers(step, graphs):
    """A program for each optimizer; `step(model, optimizer, x, y)`."""
    for name, make in OPTIMIZERS.items():

        def run(wrap, make=make):
            model = network()
            optimizer = make(model.parameters())
            found, call = train(wrap, lambda x, y: step(model, optimizer, x, y), 7, model)
            return [found, optimizer.state_dict()], call

        PROGRAMS[f"{step.__name__}, {name}"] = run, graphs
    return step


def zeroed_first(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def zeroed_before_the_backward(model, optimizer, x, y):
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def zeroed_in_place(model, optimizer, x, y):
    optimizer.zero_grad(set_to_none=False)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def zeroed_last_with_a_loss_that_has_a_history(model, optimizer, x, y):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def never_zeroed(model, optimizer, x, y):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def clipped(model, optimizer, x, y):
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return norm


def clipped_by_value(model, optimizer, x, y):
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    optimizer.step()


def several_backwards(model, optimizer, x, y):
    optimizer.zero_grad()
    out = model(x)
    loss = out.square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    F.cross_entropy(model(x), y).backward(inputs=[model[0].weight])
    model(x).backward(gradient=torch.ones(4, 3))
    optimizer.step()
    return loss.detach()


def accumulated_inside(model, optimizer, x, y):
    optimizer.zero_grad()
    total = 0.0
    for part, labels in zip(x.chunk(2), y.chunk(2), strict=True):
        loss = F.cross_entropy(model(part), labels) / 2
        loss.backward()
        total = total + loss.detach()
    optimizer.step()
    return total


def gradients_changed_by_hand(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    for p in model.parameters():
        p.grad.add_(torch.randn_like(p.grad), alpha=0.01)
        p.grad = p.grad / (p.grad.norm() + 1e-6)
    optimizer.step()
    return loss


def gradients_replaced(model, optimizer, x, y):
    first, last = model[0], model[2]
    first.weight.grad = torch.ones_like(first.weight)
    first.bias.grad = first.bias * 1
    last.bias.grad = None
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def gradient_of_a_gradient(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (loss + 0.1 * sum(g.square().sum() for g in gradients)).backward()
    optimizer.step()
    return loss


def by_a_closure(model, optimizer, x, y):
    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return optimizer.step(closure)


for each in (
    zeroed_first, zeroed_before_the_backward, zeroed_in_place, zeroed_last_with_a_loss_that_has_a_history,
    never_zeroed, clipped, clipped_by_value, several_backwards, accumulated_inside, gradients_changed_by_hand,
    gradients_replaced, gradient_of_a_gradient, by_a_closure,
):  # fmt: skip
    with_optimizers(each, 2)


@program(graphs=6)
def accumulated_over_calls(wrap):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x, y, is_last):
        loss = F.cross_entropy(model(x), y) / 4
        loss.backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    call = wrap(step)
    return [[call(*b, (i + 1) % 4 == 0), seen(model)] for i, b in enumerate(batches(24))], call


@program(graphs=6)
def accumulated_by_an_index(wrap):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(index, x, y):
        loss = F.cross_entropy(model(x), y) / 4
        loss.backward()
        if (index + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    call = wrap(step)
    return [[call(i, *b), seen(model)] for i, b in enumerate(batches(40))], call


@program(graphs=2)
def hook_on_a_parameter(wrap):
    model = network()
    model[0].weight.register_hook(lambda gradient: gradient * 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return train(wrap, lambda x, y: zeroed_first(model, optimizer, x, y), 5, model)


@program(graphs=1)
def optimizers_in_the_backward(wrap):
    model = network()
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

    def update(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return train(wrap, step, 5, model)


@program(graphs=2)
def hook_that_appends(wrap):
    model, norms = network(), []
    model[0].weight.register_hook(lambda gradient: norms.append(gradient.sum()))

    def step(x, y):
        F.cross_entropy(model(x), y).backward()

    found, call = train(wrap, step, 5, model)
    return [found, norms], call


@program(graphs=3)
def hook_registered_later_and_removed(wrap):
    model, handles = network(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def each(index):
        if index == 3:
            handles.append(model[0].weight.register_hook(lambda gradient: gradient * 3))
        if index == 6:
            handles[0].remove()

    return train(wrap, lambda x, y: zeroed_first(model, optimizer, x, y), 9, model, each=each)


@program(graphs=2)
def adversarial_networks(wrap):
    generator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8))
    critic = nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01, betas=(0.5, 0.999)) for m in (generator, critic)]

    def step(real, _):
        critic.zero_grad()
        label = torch.full((4,), 1.0)
        of_real = F.binary_cross_entropy_with_logits(critic(real).view(-1), label)
        of_real.backward()
        fake = generator(real[:, :4])
        label.fill_(0.0)
        of_fake = F.binary_cross_entropy_with_logits(critic(fake.detach()).view(-1), label)
        of_fake.backward()
        optimizers[1].step()
        generator.zero_grad()
        label.fill_(1.0)
        loss = F.binary_cross_entropy_with_logits(critic(fake).view(-1), label)
        loss.backward()
        optimizers[0].step()
        return of_real.item() + of_fake.item(), loss.item()

    return train(wrap, step, 6, generator, critic)


@program(graphs=2)
def moving_average(wrap):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))

    def step(x, y):
        loss = zeroed_first(model, optimizer, x, y)
        average.update_parameters(model)
        return loss

    return train(wrap, step, 8, model, average)


@program(graphs=2)
def groups_and_a_scheduler_inside(wrap):
    model = network()
    groups = [{"params": model[0].parameters(), "lr": 0.01, "weight_decay": 0.1}, {"params": model[2].parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)

    def step(x, y):
        loss = zeroed_first(model, optimizer, x, y)
        scheduler.step()
        return loss

    found, call = train(wrap, step, 20, model)
    return [found, scheduler.get_last_lr()], call


@program(graphs=2)
def a_scheduler_outside(wrap):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    step = lambda x, y: zeroed_first(model, optimizer, x, y)
    return train(wrap, step, 20, model, each=lambda index: index and scheduler.step())


@program(graphs=4)
def layers_frozen_and_thawed(wrap):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def each(index):
        if index in (4, 8):
            model[0].requires_grad_(index == 8)

    return train(wrap, lambda x, y: zeroed_first(model, optimizer, x, y), 12, model, each=each)


@program(graphs=3)
def states_loaded(wrap):
    model, saved = network(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def each(index):
        if index == 4:
            saved.append(copy.deepcopy((model.state_dict(), optimizer.state_dict())))
        if index == 8:
            model.load_state_dict(saved[0][0])
            optimizer.load_state_dict(saved[0][1])

    return train(wrap, lambda x, y: zeroed_first(model, optimizer, x, y), 12, model, each=each)


@program(graphs=3)
def group_added(wrap):
    model, head = network(), nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    whole = nn.Sequential(model, head)

    def each(index):
        if index == 5:
            optimizer.add_param_group({"params": head.parameters()})

    return train(wrap, lambda x, y: zeroed_first(whole, optimizer, x, y), 10, whole, each=each)


@program(graphs=1)
def updated_outside(wrap):
    model = network()

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    def each(_):
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.data -= 0.1 * parameter.grad
        model.zero_grad()

    return train(wrap, step, 8, model, each=each)


@program(graphs=2)
def gradients_kept_by_the_caller(wrap):
    model, kept = network(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    each = lambda _: kept.append([p.grad for p in model.parameters()])
    found, call = train(wrap, lambda x, y: zeroed_first(model, optimizer, x, y), 6, model, each=each)
    return [found, kept], call


@program(graphs=2)
def the_same_gradient_is_added_to(wrap):
    model = network()

    def step(x, y):
        F.cross_entropy(model(x), y).backward()

    kept = []
    found, call = train(wrap, step, 4, model, each=lambda _: kept.append(model[0].weight.grad))
    return [found, [gradient is kept[1] for gradient in kept]], call


@program(graphs=2)
def gradient_of_an_argument(wrap):
    weight, x = torch.randn(8, 3, requires_grad=True), torch.randn(4, 8, requires_grad=True)

    def step(x, y):
        x.grad = None
        F.cross_entropy(x @ weight, y).backward()
        return x.grad

    call, found = wrap(step), []
    for _, y in batches(5):
        gradient = call(x, y)
        found.append([gradient.clone(), gradient is x.grad, weight.grad.clone()])
    return found, call


@program(graphs=2)
def arguments_that_gather_gradients(wrap):
    weights = [torch.randn(8, 8, requires_grad=True), torch.randn(8, 3, requires_grad=True)]

    def step(weights, x, y):
        F.cross_entropy((x @ weights[0]).relu() @ weights[1], y).backward()
        with torch.no_grad():
            for weight in weights:
                weight -= 0.01 * weight.grad

    call = wrap(step)
    for x, y in batches(5):
        call(weights, x, y)
    return [*weights, *(w.grad for w in weights)], call


@program(graphs=2)
def gradient_by_the_input(wrap):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, y):
        x = x.clone().requires_grad_()
        F.cross_entropy(model(x), y).backward()
        return zeroed_first(model, optimizer, (x + 0.1 * x.grad.sign()).detach(), y)

    return train(wrap, step, 6, model)


@program(graphs=2)
def parameters_tied_and_unused(wrap):
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 10, bias=False))
    model[1].weight = model[0].weight
    unused = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW([*model.parameters(), *unused.parameters()], lr=0.1)

    def step(x, y):
        return zeroed_first(model, optimizer, y, y)

    return train(wrap, step, 6, model, unused)


@program(graphs=2)
def dropout_and_batch_norm(wrap):
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(x, y):
        model.train()
        return zeroed_first(model, optimizer, x, y)

    return train(wrap, step, 6, model)


@program(graphs=2)
def checkpointed(wrap):
    model = nn.ModuleList([*(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 3)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(x, y):
        optimizer.zero_grad()
        for block in model[:3]:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).tanh()
        loss = F.cross_entropy(model[3](x), y)
        loss.backward()
        optimizer.step()
        return loss

    return train(wrap, step, 6, model)


@program(graphs=2)
def under_autocast(wrap):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, y):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return train(wrap, step, 6, model)


@program(graphs=2)
def a_trainer_that_counts(wrap):
    class Trainer:
        def __init__(self):
            self.model = network()
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
            self.steps, self.total = 0, 0.0

        def step(self, x, y):
            loss = zeroed_first(self.model, self.optimizer, x, y)
            self.steps += 1
            self.total += loss.item()
            return loss

    trainer = Trainer()
    found, call = train(wrap, trainer.step, 8, trainer.model)
    return [found, trainer.steps, trainer.total], call


@program(graphs=4)
def a_gradient_scaler_beside_the_step(wrap):
    """With the scale as an argument of the step."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    scaler.scale(torch.ones(()))

    def step(x, y, scale):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        (loss * scale).backward()
        return loss.detach()

    call, found = wrap(step), []
    for number, (x, y) in enumerate(batches(12)):
        found.append(call(x * (3e38 if number == 5 else 1), y, scaler.get_scale()))
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return [[value for value in found if value.isfinite()], seen(model), scaler.state_dict()], call


@program(graphs=2)
def a_closure_of_lbfgs(wrap):
    """What the refusal of LBFGS inside says to do."""
    model, (x, y) = network(), batches(1)[0]
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1)

    def closure():
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    call = wrap(closure)
    losses = [optimizer.step(call) for _ in range(3)]
    return [losses, seen(model)], call


@program(graphs=2)
def a_step_of_functions(wrap):
    """`torch.func`: parameters are arguments and results."""
    model = network()
    start = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss_of(parameters, x, y):
        return F.cross_entropy(torch.func.functional_call(model, parameters, (x,)), y)

    def step(parameters, x, y):
        gradients, loss = torch.func.grad_and_value(loss_of)(parameters, x, y)
        return {name: value - 0.1 * gradients[name] for name, value in parameters.items()}, loss

    call, parameters, losses = wrap(step), start, []
    for x, y in batches(8):
        parameters, loss = call(parameters, x, y)
        losses.append(loss)
    return [losses, parameters], call


@program(graphs=5)
def weights_averaged_from_some_step_on(wrap):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    average = torch.optim.swa_utils.AveragedModel(model)
    scheduler = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05)

    def step(averages, x, y):
        loss = zeroed_first(model, optimizer, x, y)
        if averages:
            average.update_parameters(model)
        return loss

    call, losses = wrap(step), []
    for number, (x, y) in enumerate(batches(30)):
        losses.append(call(number >= 10, x, y).detach())
        if number >= 10:
            scheduler.step()
    return [losses, seen(model, average)], call


@program(graphs=5)
def twenty_steps_of_a_transformer(wrap):
    """Dropout, clipping, a schedule, gradients of two batches a step."""
    model = nn.Sequential(
        nn.Embedding(20, 16),
        *(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True, norm_first=True) for _ in range(2)),
        nn.Linear(16, 20),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=60)

    def step(ids, is_last):
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()) / 2
        loss.backward()
        if is_last:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    call, losses = wrap(step), []
    for _ in range(20):
        losses += [call(torch.randint(0, 20, (2, 9)), is_last) for is_last in (False, True)]
        scheduler.step()
    return [losses, seen(model), optimizer.state_dict()], call
