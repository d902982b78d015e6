"""What a function does in Python besides computing: each program in eager and compiled, over several calls."""

import collections
import copy
import functools
import math
import types
import warnings
import weakref

import pytest
import torch
from torch import nn

import foregrad
from foregrad.errors import ForegradWarning, UnsupportedSideEffectError


def numbers(*values):
    return torch.tensor(values, dtype=torch.float32)


def linear():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU())


# -------------------------------------------------------------------- two names of one tensor that part later


def parted(container, first, second, read, write):
    def program(wrap):
        held = container(numbers(1.0, 2.0))
        call = wrap(lambda x: x * read(held, first) + read(held, second))
        found = [call(numbers(1.0, 1.0))]
        write(held, second, numbers(10.0, 20.0))
        return [*found, call(numbers(1.0, 1.0)), call(numbers(1.0, 1.0))]

    return program


def namespace(tensor):
    return types.SimpleNamespace(a=tensor, b=tensor)


def buffers(wrap):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            shared = numbers(1.0, 2.0)
            self.register_buffer("a", shared)
            self.register_buffer("b", shared)

        def forward(self, x):
            return x * self.a + self.b

    module = Scaled()
    call = wrap(module)
    found = [call(numbers(1.0, 1.0))]
    module.b = numbers(10.0, 20.0)
    return [*found, call(numbers(1.0, 1.0))]


def tied_weights(wrap):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = module[0].weight
    call = wrap(module)
    call(numbers(1.0, 1.0)).sum().backward()
    module[1].weight = nn.Parameter(torch.ones(2, 2))
    call(numbers(1.0, 1.0)).sum().backward()
    return [module[0].weight.grad, module[1].weight.grad]


# -------------------------------------------------------------------- functions that keep their results


def cached_number(wrap):
    @functools.cache
    def coefficient(value):
        return math.sqrt(value)

    call = wrap(lambda x, value: x * coefficient(value))
    return [call(numbers(1.0, 2.0), value) for value in (4.0, 9.0, 16.0, 25.0)]


def cached_with_an_effect(wrap):
    log = []

    @functools.lru_cache(maxsize=8)
    def coefficient(value):
        log.append(value)
        return value * 2

    call = wrap(lambda x, value: x * coefficient(value))
    return [*(call(numbers(1.0, 2.0), value) for value in (4.0, 9.0, 16.0, 4.0)), log]


def weak_values(wrap):
    class Entry:
        def __init__(self, value):
            self.value = value

    table, kept = weakref.WeakValueDictionary(), []

    def entry(value):
        found = table.get(value)
        if found is None:
            found = table[value] = Entry(value)
            kept.append(found)
        return found

    call = wrap(lambda x, value: x * entry(value).value)
    return [*(call(numbers(1.0, 2.0), value) for value in (4, 9, 16, 4)), sorted(table.keys())]


# -------------------------------------------------------------------- hooks in a forward


def counted_by_a_hook(kind):
    def program(wrap):
        module, counter, count = linear(), types.SimpleNamespace(n=0), 0

        def hook(_, values, *result):
            nonlocal count
            count += 1
            counter.n += 1
            return result[0] * count if result else (values[0] * counter.n,)

        getattr(module[0], f"register_forward_{kind}")(hook)
        call = wrap(module)
        return [*(call(numbers(1.0, 1.0)) for _ in range(5)), count, counter.n]

    return program


def hooks_of_all_modules(wrap):
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    try:
        call = wrap(linear())
        return [*(call(numbers(1.0, 1.0)) for _ in range(4)), seen]
    finally:
        handle.remove()


# -------------------------------------------------------------------- text of sizes


def text_returned(wrap):
    call = wrap(lambda x: f"n={x.shape[0]}")
    return [call(torch.ones(size)) for size in (3, 4, 5, 6)]


def text_kept(wrap):
    state = {}

    def step(x):
        state["text"] = f"n={x.shape[0]}, {x.shape[0]!r}"
        return x + 1

    call, found = wrap(step), []
    for size in (3, 4, 5, 6):
        call(torch.ones(size))
        found.append(state["text"])
    return found


# -------------------------------------------------------------------- what a backward reads


class State:
    scale = 2.0


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient * State.scale


def by_hook(read):
    def step(x):
        y = x * 2
        y.register_hook(lambda gradient: gradient * read())
        return y * 3

    return step


def set_before_the_backward(step, values=(2.0, 10.0, 20.0)):
    def program(wrap):
        call, found = wrap(step), []
        for value in values:
            x = numbers(1.0, 2.0).requires_grad_()
            State.scale = 1.0
            y = call(x)
            State.scale = value
            y.sum().backward()
            found.append(x.grad)
        return found

    return program


def list_that_a_hook_fills(wrap):
    def step(x):
        seen, y = [], x * 2
        y.register_hook(lambda gradient: seen.append(gradient.sum().item()))
        return y * 3, seen

    call, found = wrap(step), []
    for _ in range(3):
        y, seen = call(numbers(1.0, 2.0).requires_grad_())
        y.sum().backward()
        found.append(seen)
    return found


def unused_output(wrap):
    class Two(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.set_materialize_grads(False)
            return x * 2, y * 3

        @staticmethod
        def backward(ctx, first, second):
            return None if first is None else first * 2, None if second is None else second * 3

    x, y = numbers(1.0, 2.0).requires_grad_(), numbers(1.0, 2.0).requires_grad_()
    wrap(lambda x, y: Two.apply(x, y)[0])(x, y).sum().backward()
    return [x.grad, y.grad]


def checkpointed(counts):
    def program(wrap):
        from torch.utils.checkpoint import checkpoint

        torch.manual_seed(0)
        norm, count = nn.BatchNorm1d(2), [0]

        def part(x):
            count[0] += counts
            return norm(x) * 2

        call = wrap(lambda x: checkpoint(part, x, use_reentrant=False))
        for _ in range(2):
            call(torch.randn(4, 2).requires_grad_()).sum().backward()
        return [norm.running_mean, norm.num_batches_tracked, count]

    return program


# -------------------------------------------------------------------- results


def module_made_inside(make):
    def program(wrap):
        base = linear()

        def step(x):
            module = make(base)
            return module, module(x)

        call, found = wrap(step), []
        for _ in range(2):
            torch.manual_seed(1)
            module, y = call(numbers(1.0, 2.0))
            found += [type(next(module.parameters())).__name__, [*module.parameters()], y]
        return found

    return program


def made_plain(wrap):
    y = wrap(lambda x: torch.Tensor._make_subclass(torch.Tensor, x + 1))(numbers(1.0, 2.0))
    return [y, y.device]


def quantized(wrap):
    y = wrap(lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize())(numbers(1.0, 2.0))
    return [y, y.dtype]


# -------------------------------------------------------------------- reads


def set_between(value, read, change):
    def program(wrap):
        held = value()
        call = wrap(lambda x: x * read(held))
        found = [call(numbers(1.0))]
        for number in (3.0, 4.0):
            change(held, number)
            found.append(call(numbers(1.0)))
        return found

    return program


class Pair(tuple):  # noqa: SLOT001 - it has attributes
    pass


EVALUATED = 2.0


def evaluated(wrap):
    global EVALUATED
    EVALUATED = 2.0
    text = "EVAL" + "UATED"
    call = wrap(lambda x: x * eval(text))
    found = [call(numbers(1.0))]
    EVALUATED = 3.0
    return [*found, call(numbers(1.0))]


def switched(ask, switch):
    def program(wrap):
        call = wrap(lambda x: x * (2.0 if ask() else 5.0))
        found = [call(numbers(1.0))]
        switch(False)
        try:
            return [*found, call(numbers(1.0))]
        finally:
            switch(True)

    return program


def set_item(held, key, value):
    held[key] = value


def autocast_to(bfloat16):
    torch.set_autocast_dtype("cpu", torch.bfloat16 if bfloat16 else torch.float16)


# -------------------------------------------------------------------- attributes of tensors


def attribute_of(step, held=lambda w: w):
    """`step(w, x)` works with attributes of a closed-over `w`; after each call these are part of what is found."""

    def program(wrap):
        found = []
        for used in (False, True):
            w = _with(nn.Parameter(numbers(1.0, 2.0)), 1)
            call = wrap(lambda x, w=w, used=used: step(held(w), x) * (w if used else 1.0))
            for number in (1.0, 2.0, 3.0):
                found += [call(numbers(number)), getattr(w, "k", None), getattr(w, "sample", "none")]
        return found

    return program


def count_on(w, x):
    w.k += 1
    return x * w.k


def set_to_none(w, x):
    w.sample = None
    return x * 2


def keep_on(w, x):
    w.sample = x.sum()
    return x * 2


def toggle(w, x):
    if hasattr(w, "k"):
        del w.k
        return x
    w.k = 1
    return x * 2


def replaced_after_a_write(wrap):
    holder = types.SimpleNamespace(w=nn.Parameter(numbers(1.0)))
    call = wrap(lambda x: set_to_none(holder.w, x) * holder.w)
    found = [call(numbers(1.0))]
    holder.w = nn.Parameter(numbers(2.0))
    return [*found, call(numbers(1.0)), getattr(holder.w, "sample", "none")]


def replaced_with_its_attributes(wrap):
    holder = types.SimpleNamespace(w=_with(numbers(1.0), 2.0))
    call = wrap(lambda x: x * holder.w.k)
    found = [call(numbers(1.0))]
    holder.w.k = 3.0
    found.append(call(numbers(1.0)))
    holder.w = _with(numbers(1.0), 4.0)
    return [*found, call(numbers(1.0))]


# -------------------------------------------------------------------- what hooks keep, and what they look at


class Active:
    names = ()

    @classmethod
    def get(cls):
        return cls.names


def inputs_kept_beside_backward_hooks(wrap):
    model = linear()
    for part in model:
        part.register_forward_hook(lambda m, args, out: m.__dict__.update(input0=args[0], output=out))
        part.register_full_backward_hook(lambda m, before, after: None)
    call, found = wrap(model), []
    for number in (1.0, 2.0, 3.0):
        call(numbers(number, 1.0)).sum().backward()
        found += [model[0].weight.grad.clone(), model[1].input0, model[1].input0._version, model[0].output]
    return found


def asked_of_a_class_in_the_backward(wrap):
    model, seen = linear(), []

    def hook(module, before, after):
        for name in Active.get():
            seen.append((name, after[0].sum()))

    model[1].register_full_backward_hook(hook)
    call = wrap(model)
    for number in (1.0, 2.0, 3.0, 4.0):
        result = call(numbers(number, 1.0).requires_grad_()).sum()
        Active.names = (f"at {number}",)
        result.backward()
        Active.names = ()
    return seen


# -------------------------------------------------------------------- arrays over the memory of what is written


def array_over_an_argument(read):
    def program(wrap):
        x = numbers(0.0, 0.0)
        array = x.numpy()
        call = wrap(lambda x: (x.add_(1), x * read(array))[1])
        return [call(x).clone() for _ in range(3)]

    return program


PROGRAMS = {
    "an array over an argument is summed": array_over_an_argument(lambda a: float(a.sum())),
    "an array over an argument is a tensor": array_over_an_argument(torch.from_numpy),
    "inputs kept beside backward hooks": inputs_kept_beside_backward_hooks,
    "a backward hook asks a class": asked_of_a_class_in_the_backward,
    "a tensor counts": attribute_of(count_on),
    "a tensor in a list counts": attribute_of(lambda ws, x: count_on(ws[0], x), lambda w: [w]),
    "an attribute of a tensor set to None": attribute_of(set_to_none),
    "a result kept on a tensor": attribute_of(keep_on),
    "an attribute of a tensor comes and goes": attribute_of(toggle),
    "a tensor replaced after a write to its attributes": replaced_after_a_write,
    "a tensor replaced with its attributes": replaced_with_its_attributes,
    "items of a dict part": parted(lambda t: {"a": t, "b": t}, "a", "b", dict.__getitem__, set_item),
    "items of a list part": parted(lambda t: [t, t], 0, 1, list.__getitem__, set_item),
    "attributes part": parted(namespace, "a", "b", getattr, setattr),
    "buffers part": buffers,
    "tied weights part": tied_weights,
    "a cached number": cached_number,
    "a cached function with an effect": cached_with_an_effect,
    "a table of weak values": weak_values,
    "a forward hook counts": counted_by_a_hook("hook"),
    "a pre-hook counts": counted_by_a_hook("pre_hook"),
    "hooks of all modules": hooks_of_all_modules,
    "the text of a size": text_returned,
    "the text of a size, kept": text_kept,
    "a backward reads a class": set_before_the_backward(lambda x: Scaled.apply(x)),
    "a hook reads a class": set_before_the_backward(by_hook(lambda: State.scale)),
    "a hook fills a list": list_that_a_hook_fills,
    "an output without gradient": unused_output,
    "a checkpoint counts": checkpointed(1),
    "a checkpoint normalizes": checkpointed(0),
    "a module is made": module_made_inside(lambda _: nn.Linear(2, 2)),
    "a module is copied": module_made_inside(copy.deepcopy),
    "a plain subclass": made_plain,
    "quantized": quantized,
    "an attribute of an exception": set_between(
        lambda: types.SimpleNamespace(e=_error(2.0)), lambda h: h.e.k, lambda h, n: setattr(h.e, "k", n)
    ),
    "arguments of an exception": set_between(
        lambda: ValueError(2.0), lambda e: e.args[0], lambda e, n: setattr(e, "args", (n,))
    ),
    "an attribute of a tuple": set_between(lambda: _with(Pair((1, 2))), lambda p: p.k, lambda p, n: setattr(p, "k", n)),
    "an attribute of an ordered dict": set_between(
        lambda: _with(collections.OrderedDict()), lambda p: p.k, lambda p, n: setattr(p, "k", n)
    ),
    "evaluated": evaluated,
    "the dtype of autocast": switched(lambda: torch.get_autocast_dtype("cpu") == torch.bfloat16, autocast_to),
    "attention kernels": switched(lambda: torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.enable_math_sdp),
}


def _error(number):
    return _with(ValueError(), number)


def _with(value, number=2.0):
    value.k = number
    return value


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize("name", PROGRAMS)
def test_as_in_eager(name):
    """Compiled, or eagerly with a warning: never another result."""
    program = PROGRAMS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ForegradWarning)
        warnings.simplefilter("ignore", UserWarning)
        expected = program(lambda function: function)
        found = program(lambda function: foregrad.compile(function, backend="eager", on_unsupported="eager"))
    assert same(expected, found), (expected, found)


def test_an_attribute_set_on_a_tensor_that_is_no_input_is_refused_by_name():
    w = _with(numbers(1.0), 1)
    with pytest.raises(UnsupportedSideEffectError, match=r"w\.k, an attribute of a tensor"):
        foregrad.capture(lambda x: count_on(w, x), numbers(1.0))
    assert w.k == 1
