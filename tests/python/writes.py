"""Programs that write to Python's state: places x what is written there x what happens between calls.

`python -m tests.python.writes` runs all of them and says which differ from eager.
"""

import collections
import dataclasses
import itertools
import sys
import types
import warnings

import torch
from torch import nn

import foregrad

# Each place: what makes it (with `INIT` for what is there first), and how code spells it.
PLACES = {
    "module": ("", "self.a", "self.a = INIT"),
    "submodule": ("", "self.sub.a", "self.sub.a = INIT"),
    "object": ("class Plain: pass\nobj = Plain()\nobj.a = INIT", "obj.a", ""),
    "object of module": ("class Plain: pass", "self.obj.a", "self.obj = Plain(); self.obj.a = INIT"),
    "object in list": ("class Plain: pass", "self.objs[0].a", "self.objs = [Plain()]; self.objs[0].a = INIT"),
    "slots": ("class Slots:\n    __slots__ = ('a',)\nobj = Slots()\nobj.a = INIT", "obj.a", ""),
    "class": ("class Plain:\n    a = INIT", "Plain.a", ""),
    "class of module": ("", "type(self).a", "type(self).a = INIT"),
    "global": ("G = INIT", "G", ""),
    "dict": ("table = {'k': INIT, 'z': 1}", "table['k']", ""),
    "dict of module": ("", "self.table['k']", "self.table = {'k': INIT}"),
    "nested dict": ("table = {'u': {'k': INIT}}", "table['u']['k']", ""),
    "list": ("items = [INIT, 7]", "items[0]", ""),
    "list of module": ("", "self.items[0]", "self.items = [INIT]"),
    "deque": ("items = collections.deque([INIT, 7])", "items[0]", ""),
    "ordered dict": ("table = collections.OrderedDict(k=INIT)", "table['k']", ""),
    "default dict": ("table = collections.defaultdict(int, k=INIT)", "table['k']", ""),
    "namespace": ("space = types.SimpleNamespace(a=INIT)", "space.a", ""),
    "dataclass": ("@dataclasses.dataclass\nclass D:\n    a: object\nobj = D(INIT)", "obj.a", ""),
    "function": ("def holder(): pass\nholder.a = INIT", "holder.a", ""),
    "nonlocal": ("", "cell", ""),
}
WRITES = {
    "constant": ("0", "T = 5"),
    "counter": ("0", "T = T + 1"),
    "counter used after": ("0", "T += 1\ny = y * T"),
    "counter used before": ("1", "y = y * T\nT += 1"),
    "counter branched on": ("0", "if T % 2 == 0:\n    y = y * 2\nT += 1"),
    "cycle": ("0", "T = T + 1 if T < 2 else 0\ny = y + T"),
    "float": ("1.0", "T = T * 0.5 + 0.25\ny = y + T"),
    "item": ("0.0", "T = y.mean().item()"),
    "average of items": ("0.0", "T = 0.9 * T + 0.1 * y.mean().item()"),
    "tensor": ("None", "T = y"),
    "detached": ("None", "T = y.detach()"),
    "average": ("torch.zeros(())", "T = 0.9 * T + 0.1 * y.detach().mean()"),
    "state": ("torch.zeros(())", "T = T + y.detach().sum()\ny = y + T"),
    "tuple": ("None", "T = (y.detach(), 1)"),
    "fresh list": ("None", "T = [y.detach(), x.shape[0]]"),
    "fresh dict": ("None", "T = {'a': y.detach().mean(), 'b': None}"),
    "flag": ("False", "T = not T\ny = y * 2 if T else y"),
    "argument": ("None", "T = x"),
    "parameter": ("None", "T = self.w"),
    "old object": ("None", "T = OTHER"),
    "size": ("0", "T = x.shape[0]"),
    "twice": ("None", "T = 1\nT = y.detach()"),
    "text": ("'off'", "T = 'on' if T == 'off' else 'off'\ny = y * len(T)"),
    "cache": ("None", "if T is None:\n    T = torch.arange(3.0)\ny = y + T"),
    "read after": ("None", "T = y.detach()\ny = y + T.mean()"),
    "same": ("1.5", "T = T\ny = y * T"),
    "come and go": ("None", "T = None if T is not None else y.detach()"),
    "view": ("None", "T = y.detach()[0]"),
}
BETWEEN = ("nothing", "reset", "sizes", "modes")


def source(place, write):
    setup, target, init = PLACES[place]
    first, body = WRITES[write]
    body = body.replace("T", "\0").replace("O\0HER", "OTHER").replace("\0", target)
    lines = []
    if place == "global":
        lines.append("global G")
    if place == "nonlocal":
        lines.append("nonlocal cell")
    body = "\n".join(
        f"            {line}" for line in [*lines, "y = (x * self.w).tanh()", *body.splitlines(), "return y"]
    )
    init = init.replace("INIT", first) or "pass"
    cell = "cell = " + first
    reset = f"{target} = {first}"
    before = "global G" if place == "global" else "nonlocal cell" if place == "nonlocal" else "pass"
    return f"""
OTHER = [1, 2]
{setup.replace("INIT", first)}
def make():
    {cell}
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor([1.0, 0.5, -0.25]))
            self.sub = nn.Linear(1, 1)
            {init}
        def forward(self, x):
{body}
    self = Model()
    def look():
        return {target}
    def reset():
        {before}
        {reset}
    return self, look, reset
"""


def shown(value, known):
    if isinstance(value, torch.Tensor):
        if id(value) in known:
            return known[id(value)]
        assert type(value) in (torch.Tensor, nn.Parameter), type(value)
        return ("tensor", value.tolist(), value.requires_grad, value.is_leaf, tuple(value.shape))
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [shown(item, known) for item in value])
    if isinstance(value, dict):
        return [(key, shown(item, known)) for key, item in value.items()]
    assert isinstance(value, (int, float, str, type(None))), type(value)
    return (type(value).__name__, value)


def run(place, write, between, wrap, calls=4):
    """What the calls give and leave behind, and the compiled module."""
    world = {"torch": torch, "nn": nn, "collections": collections, "types": types, "dataclasses": dataclasses}
    world["__name__"] = f"world_{abs(hash((place, write)))}"
    exec(compile(source(place, write), f"<{place}, {write}>", "exec"), world)
    module, look, reset = world["make"]()
    call = wrap(module)
    found = []
    for i in range(calls):
        rows = 2 + i if between == "sizes" else 2
        x = (torch.arange(rows * 3.0).reshape(rows, 3) + i) / 4
        if between == "reset" and i == 2:
            reset()
        if between == "modes":
            module.train(i % 2 == 0)
        known = {id(x): "x", id(module.w): "w"}
        y = call(x)
        value = look()
        other = "OTHER" if value is world["OTHER"] else shown(value, known)
        is_result = value is y
        module.w.grad = None
        y.sum().backward()
        found.append((y.tolist(), module.w.grad.tolist(), other, is_result))
    return found, call


def compiled(module):
    return foregrad.compile(module, backend="eager", on_unsupported="eager")


def through_dynamo(module):
    torch._dynamo.reset()
    return torch.compile(module, backend="foregrad", options={"backend": "eager"})


def programs():
    return list(itertools.product(PLACES, WRITES, BETWEEN))


def check(place, write, between, wrap=compiled):
    """(what differs or None, how many calls ran eagerly, how many graphs there are)."""
    expected, _ = run(place, write, between, lambda module: module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found, call = run(place, write, between, wrap)
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:300], 0, 0
    wrong = next((i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b), None)
    said = None if wrong is None else f"call {wrong}: {expected[wrong]} != {found[wrong]}"
    if wrap is not compiled:
        return said, 0, 0
    report = foregrad.explain_recompiles(call)
    return said, report.eager_calls, len(report)


def main():
    chosen = programs()
    if len(sys.argv) > 1:
        chosen = chosen[:: int(sys.argv[1])]
    differ, eager, graphs = [], [], 0
    for program in chosen:
        said, calls, count = check(*program)
        graphs += count
        if said:
            differ.append(program)
            print("DIFFERS", program, said)
        elif calls:
            eager.append(program)
            print("eager", program)
    print(f"{len(chosen)} programs: {len(differ)} differ, {len(eager)} ran eagerly, {graphs} graphs")


if __name__ == "__main__":
    main()
