"""Programs that are given, give back and write to objects: each is a text with `step(*given)` and `give(i)`.

`give(i)` makes what call number `i` is given, anew for eager and for the compiled function; `seen(given, result)`, where
a program has it, says what else there is to look at.
"""

import collections
import enum
import types
import weakref

import torch
from torch import nn

import foregrad

__all__ = ["CAPTURED", "EAGER", "SOMETIMES", "check"]

CLASSES = """
class Plain:
    def __init__(self, x, **rest):
        self.x = x
        self.__dict__.update(rest)

class Slots:
    __slots__ = ("x", "y", "__weakref__")
    def __init__(self, x): self.x = x

class Child(Slots):
    __slots__ = ("z",)

class Mixed(Slots):
    pass

@dataclasses.dataclass
class Data:
    x: object
    n: int = 0
    parts: list = dataclasses.field(default_factory=list)

@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: object
    tag: str = "a"

class Table(dict):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.used = 0
    def __getitem__(self, key):
        self.used += 1
        return super().__getitem__(key)

class Ordered(collections.OrderedDict):
    pass

class Row(list):
    name = "row"

class Queue(collections.deque):
    pass

class Counted:
    made = 0
    def __new__(cls, *args):
        return super().__new__(cls)
    def __init__(self, x): self.x = x

class Picky:
    def __init__(self, x): object.__setattr__(self, "x", x)
    def __setattr__(self, name, value): raise AttributeError(name)
    def __getattribute__(self, name):
        return object.__getattribute__(self, name)

class Lazy:
    def __init__(self, x): self.x = x
    @functools.cached_property
    def double(self): return self.x * 2
    @property
    def half(self): return self.x / 2

class Cache:
    def __init__(self): self.keys, self.seen, self.parts = None, 0, []
    def update(self, k):
        self.keys = k if self.keys is None else torch.cat([self.keys, k])
        self.seen += len(k)
        self.parts.append(k)
        return self.keys

class Color(enum.Enum):
    RED = 1
"""

# ------------------------------------------------------------------------------------------ captured

CAPTURED = {
    "an attribute": "step = lambda o: o.x * 2\ngive = lambda i: (Plain(x(i)),)",
    "slots": "step = lambda o: o.x * 2\ngive = lambda i: (Slots(x(i)),)",
    "an empty slot": """
def step(o):
    return o.x * (3 if hasattr(o, "y") else 2)
def give(i):
    o = Child(x(i))
    if i % 2: o.y = 1
    return (o,)
""",
    "slots and a dict": """
def step(o): return o.x * o.w
def give(i):
    o = Mixed(x(i)); o.w = 3
    return (o,)
""",
    "a keyword": "step = lambda *, o: o.x * o.n\ngive = lambda i: dict(o=Plain(x(i), n=2))",
    "a number that varies": "step = lambda o: o.x * o.n\ngive = lambda i: (Plain(x(i), n=i + 2),)",
    "a text that varies": "step = lambda o: o.x * len(o.s)\ngive = lambda i: (Plain(x(i), s='ab'[: i % 2]),)",
    "other attributes": "step = lambda o: o.x * len(vars(o))\ngive = lambda i: (Plain(x(i), **{'a' * (i % 3 + 1): 1}),)",
    "their order": """
def step(o): return o.x * float(list(vars(o)).index("b"))
def give(i):
    return (Plain(x(i), **(dict(a=1, b=2) if i % 2 else dict(b=2, a=1))),)
""",
    "another class": """
def step(o): return o.x * (2 if isinstance(o, Slots) else 3)
def give(i): return ((Slots if i % 2 else Plain)(x(i)),)
""",
    "a dataclass": "step = lambda o: o.x * o.n\ngive = lambda i: (Data(x(i), 2),)",
    "a frozen one": "step = lambda o: o.x * len(o.tag)\ngive = lambda i: (Frozen(x(i), 'abc'[i % 3:]),)",
    "a namespace": "step = lambda o: o.x * o.n\ngive = lambda i: (types.SimpleNamespace(x=x(i), n=2),)",
    "a method": "step = lambda o: o.update(o.x)\ngive = lambda i: (with_x(Cache(), x(i)),)",
    "properties": "step = lambda o: o.double + o.half\ngive = lambda i: (Lazy(x(i)),)\nseen = lambda o, r: [*vars(o[0])]",
    "its own attribute access": "step = lambda o: o.x * 2\ngive = lambda i: (Picky(x(i)),)",
    "an enum and a module": """
layer = nn.Linear(3, 3)
def step(o): return o.layer(o.x) * o.color.value
def give(i): return (Plain(x(i), layer=layer, color=Color.RED),)
""",
    "a subclass of dict": """
def step(o): return o["x"] * o.n
def give(i):
    o = Table(x=x(i)); o.n = 2
    return (o,)
seen = lambda given, result: given[0].used
""",
    "a subclass of an ordered dict": """
def step(o):
    o["y"] = o.pop("x") * 2
    o.move_to_end("n", last=False)
    return o["y"]
give = lambda i: (Ordered(x=x(i), n=1),)
""",
    "a subclass of list": """
def step(o):
    o.append(o[0] * len(o)); o.total = o[-1].sum()
    return o.total
give = lambda i: (Row([x(i), i % 2]),)
""",
    "a subclass of deque": """
def step(o):
    o.appendleft(o[0] * 2); o.n = len(o)
    return o[0]
give = lambda i: (Queue([x(i), x(0)], 2),)
""",
    "a defaultdict": """
def step(o):
    o["b"].append(o["a"][0] * 2)
    return o["b"][0]
def give(i):
    o = collections.defaultdict(list); o["a"].append(x(i))
    return (o,)
""",
    "a set": """
def step(o):
    o.s.add(len(o.s))
    return o.x * len(o.s)
give = lambda i: (Plain(x(i), s=set(range(i % 2, 3))),)
""",
    "a counter": """
def step(o):
    o.c["b"] += 2
    return o.x * o.c["a"] * o.c["b"]
give = lambda i: (Plain(x(i), c=collections.Counter("aab")),)
""",
    "a deep one": """
def step(o): return o.a[0]["k"].b[1].x * 2
give = lambda i: (Plain(None, a=[{"k": Plain(None, b=(1, Slots(x(i))))}]),)
""",
    "written": """
def step(o):
    o.y = o.x * 2; o.n += 1; del o.old
    return o.y
give = lambda i: (Plain(x(i), n=i, old=1),)
""",
    "a slot written": """
def step(o):
    o.y = o.x * 2; o.z = o
    del o.x
    return o.y
give = lambda i: (Child(x(i)),)
""",
    "a tensor in it written": """
def step(o):
    o.x.mul_(2)
    return o.x + 1
give = lambda i: (Plain(torch.ones(3) * i),)
""",
    "written and read": """
def step(o):
    o.x = o.x * 2; o.x = o.x + 1
    return o.x * 3
give = lambda i: (Plain(x(i)),)
""",
    "a cache that grows": """
def step(o, k): return o.update(k) * 2
def give(i):
    o = Cache()
    for j in range(i % 4): o.update(x(j).detach())
    return (o, x(i))
""",
    "a list of arguments": """
def step(o):
    o.append(o[0] * 2); o[0] = 1
    return o[1]
give = lambda i: ([x(i)],)
""",
    "a dict of arguments": """
def step(o):
    o["y"] = o.pop("x") * 2
    return o["y"]
give = lambda i: ({"x": x(i)},)
""",
    "the same twice": """
def step(a, b):
    a.n = 1
    b.n += 1
    return a.x * b.n
def give(i):
    o = Plain(x(i))
    return (o, o)
""",
    "the same or not": """
def step(a, b, t):
    a.n = 5
    return t * b.n * (2 if a is b else 3)
def give(i):
    o = Plain(2, n=1)
    return (o, o if i % 2 else Plain(2, n=1), x(i))
""",
    "lists that are one or not": """
def step(a, b, t):
    a.append(1)
    return t * len(b)
def give(i):
    o = [1]
    return (o, o if i % 2 else [1], x(i))
""",
    "a tensor twice": """
def step(a, b): return a.x * b.x
def give(i):
    t = x(i)
    return (Plain(t), Plain(t if i % 2 else x(i)))
""",
    "shared inside": """
def step(o):
    o.a.append(o.x)
    return o.x * len(o.b)
def give(i):
    parts = []
    return (Plain(x(i), a=parts, b=parts),)
""",
    "a cycle": """
def step(o):
    o.me.n = 2
    return o.me.me.x * o.n
def give(i):
    o = Plain(x(i)); o.me = o
    return (o,)
""",
    "a cycle of two": """
def step(o):
    o.child.parent.child.x = o.x * 2
    return o.child.x
def give(i):
    o = Plain(x(i)); o.child = Plain(x(i), parent=o)
    return (o,)
""",
    "a weak reference to its parent": """
def step(o):
    o.child.parent().n = 3
    return o.child.parent().x * o.n
def give(i):
    o = Plain(x(i)); o.child = Plain(1, parent=weakref.ref(o))
    return (o,)
""",
    "a method of its own": """
def step(o):
    return o.grow(o.x)
def give(i):
    o = Cache(); o.x, o.grow = x(i), o.update
    return (o,)
""",
    "a partial application": """
def double(x, n): return x * n
step = lambda o: o.f(n=2)
give = lambda i: (Plain(0, f=functools.partial(double, x(i))),)
""",
    "stored in another": """
def step(a, b):
    a.other = b; b.users = [a]
    return b.x * 2
give = lambda i: (Plain(x(i)), Plain(x(i)))
seen = lambda g, r: (g[0].other is g[1], g[1].users[0] is g[0])
""",
    "put in the module": """
class Holder: last = None
holder = Holder()
def step(o):
    holder.last = o
    return o.x * 2
give = lambda i: (Plain(x(i)),)
seen = lambda g, r: holder.last is g[0]
""",
    "a distribution": """
step = lambda d, v: d.log_prob(v) + d.rsample()
give = lambda i: (torch.distributions.Normal(x(i), torch.ones(3)), x(0))
""",
    # ------------------------------------------------------------------ given back
    "itself": "step = lambda o: o\ngive = lambda i: (Plain(x(i)),)\nseen = lambda g, r: r is g[0]",
    "itself among others": """
def step(o): return o.x * 2, [o, o.part]
give = lambda i: (Plain(x(i), part=[1]),)
seen = lambda g, r: (r[1][0] is g[0], r[1][1] is g[0].part)
""",
    "an attribute that is a list": "step = lambda o: o.x\ngive = lambda i: (Plain([x(i), 1]),)\nseen = lambda g, r: r is g[0].x",
    "a new one": "step = lambda a: Plain(a * 2, n=3)\ngive = lambda i: (x(i),)",
    "a new one with slots": "step = lambda a: Child(a * 2)\ngive = lambda i: (x(i),)",
    "a new dataclass": "step = lambda a: Data(a * 2, 3, [a])\ngive = lambda i: (x(i),)",
    "a new frozen one": "step = lambda a: Frozen(a * 2, 'b')\ngive = lambda i: (x(i),)",
    "a new table": "step = lambda a: Table(a=a * 2)\ngive = lambda i: (x(i),)",
    "a new row": "step = lambda a: Row([a * 2])\ngive = lambda i: (x(i),)",
    "a new queue": "step = lambda a: Queue([a, a * 2], 2)\ngive = lambda i: (x(i),)",
    "a new deque and a set": "step = lambda a: [collections.deque([a * 2], 3), {1, 2}]\ngive = lambda i: (x(i),)",
    "a new namespace": "step = lambda a: types.SimpleNamespace(a=a * 2)\ngive = lambda i: (x(i),)",
    "a picky one": "step = lambda a: Picky(a * 2)\ngive = lambda i: (x(i),)",
    "a new cycle": """
def step(a):
    o = Plain(a * 2); o.me = [o]; o.child = Plain(1, parent=weakref.ref(o))
    return o
give = lambda i: (x(i),)
seen = lambda g, r: (r.me[0] is r, r.child.parent() is r)
""",
    "one new object twice": """
def step(a):
    o, l = Plain(a * 2), [a]
    return o, o, l, l
give = lambda i: (x(i),)
seen = lambda g, r: (r[0] is r[1], r[2] is r[3])
""",
    "a new one in each call": """
kept = []
step = lambda a: Plain(a * 2)
give = lambda i: (x(i),)
def seen(g, r):
    kept.append(r)
    return len({*map(id, kept)}) == len(kept)
""",
    "left and given back": """
class Holder: last = 0
holder = Holder()
def step(a):
    holder.last = out = Plain(a * 2, parts=[a])
    return out
give = lambda i: (x(i),)
seen = lambda g, r: (holder.last is r, holder.last.parts is r.parts)
""",
    "an older one": """
config = Plain(3, parts=[1])
step = lambda a: (a * config.x, config, config.parts)
give = lambda i: (x(i),)
seen = lambda g, r: (r[1] is config, r[2] is config.parts)
""",
    "a library's": """
step = lambda a: Plain(a * 2, support=torch.distributions.constraints.positive)
give = lambda i: (x(i),)
seen = lambda g, r: r.support is torch.distributions.constraints.positive
""",
    "a closure": """
def step(a):
    b, n = a * 2, 0
    def add(c):
        nonlocal n
        n += 1
        return b + c * n
    return add, lambda: n
give = lambda i: (x(i),)
seen = lambda g, r: (r[0](1).tolist(), r[0](1).tolist(), r[1]())
""",
    "a method of a new one": "step = lambda a: Lazy(a * 2).__dict__.get\ngive = lambda i: (x(i),)\nseen = lambda g, r: 0",
    "a bound method": """
class Scale:
    def __init__(self, by): self.by = by
    def __call__(self, a): return a * self.by
    apply = __call__
step = lambda a: Scale(a * 2).apply
give = lambda i: (x(i),)
seen = lambda g, r: r(3).tolist()
""",
    "a partial result": """
step = lambda a: functools.partial(torch.add, a * 2, alpha=2)
give = lambda i: (x(i),)
seen = lambda g, r: r(torch.ones(3)).tolist()
""",
    "a distribution made": """
def step(a):
    d = torch.distributions.MultivariateNormal(a, torch.eye(3))
    return d, d.log_prob(a * 2)
give = lambda i: (x(i),)
seen = lambda g, r: (r[0].mean.tolist(), r[0].covariance_matrix.tolist(), r[0].rsample().tolist())
""",
    "a mixture made": """
def step(a):
    d = torch.distributions
    return d.MixtureSameFamily(d.Categorical(logits=a), d.Normal(a, a.exp()))
give = lambda i: (x(i),)
seen = lambda g, r: r.log_prob(torch.ones(())).tolist()
""",
    "a tensor inside is an argument": """
step = lambda a: Plain(a, view=a[:2])
give = lambda i: (x(i),)
seen = lambda g, r: (r.x is g[0], r.view._base is g[0])
""",
    "a member of an enum of numbers": """
class Red(enum.IntFlag):
    MEAN = 1
    CLIP = 2
step = lambda red, t: t.clamp(-1, 1) if red & Red.CLIP else t * int(red)
give = lambda i: (Red(1 + i % 2), x(i))
""",
    "a tensor as a key": """
def step(o, t):
    o.d[t] = 1
    return t * 2
give = lambda i: (Plain(1, d={}), x(i).detach())
seen = lambda g, r: next(iter(g[0].d)) is g[1]
""",
    "an argument as a key": """
def step(o, t):
    o.d[o] = t * 2
    return t * 2
give = lambda i: (Plain(1, d={}), x(i).detach())
seen = lambda g, r: next(iter(g[0].d)) is g[0]
""",
}

# ------------------------------------------------------------------------------------------ refused

SOMETIMES = {
    "looked up in a set": """
objects = [Plain(1) for _ in range(7)]
known = {objects[1], objects[4]}
def step(o, t): return t * (2 if o in known else 3)
give = lambda i: (objects[i], x(i))
""",
    "looked up in a dict": """
objects = [Plain(1) for _ in range(7)]
known = {objects[1]: 7}
def step(o, t): return t * known.get(o, 3)
give = lambda i: (objects[i], x(i))
""",
    "looked up weakly": """
objects = [Plain(1) for _ in range(7)]
known = weakref.WeakKeyDictionary({objects[2]: 7})
def step(o, t): return t * known.get(o, 3)
give = lambda i: (objects[i], x(i))
""",
    "one that is also reached, later": """
shared = Plain(1, n=1)
def step(o, t):
    o.n += 1
    return t * shared.n
give = lambda i: (shared if i % 3 == 2 else Plain(1, n=shared.n), x(i))
""",
    "a list that is also reached, later": """
shared = [1]
def step(o, t):
    o.append(2)
    return t * len(shared)
give = lambda i: (shared if i % 3 == 2 else [*shared], x(i))
""",
}
EAGER = {
    "a lock": "step = lambda o: o.x * 2\ngive = lambda i: (Plain(x(i), lock=threading.Lock()),)",
    "a generator": "step = lambda o: o.x * 2\ngive = lambda i: (Plain(x(i), rest=iter([1])),)",
    "its own __new__": "step = lambda o: o.x * 2\ngive = lambda i: (Counted(x(i)),)",
    "also reached": """
shared = Plain(torch.ones(3))
def step(o):
    o.n = 1
    return o.x * shared.n
give = lambda i: (shared,)
""",
    "a new lock": "step = lambda a: Plain(a * 2, lock=threading.Lock())\ngive = lambda i: (x(i),)\nseen = lambda g, r: 0",
    "an error": """
class Error(Exception): pass
step = lambda a: Error(a * 2)
give = lambda i: (x(i),)
seen = lambda g, r: r.args[0].tolist()
""",
}

MODULES = "torch collections dataclasses enum functools threading types weakref".split()


def world_of(text, name):
    world = {module: __import__(module) for module in MODULES} | {"nn": nn, "__name__": f"objects_{abs(hash(name))}"}
    world["x"] = lambda i: ((torch.arange(3.0) + i) / 4).requires_grad_()
    world["with_x"] = lambda o, x: (setattr(o, "x", x), o)[1]
    torch.manual_seed(0)
    exec(compile(CLASSES + text, f"<{name}>", "exec"), world)
    return world


def shown(value, seen=None):
    """Everything in a value, as something to compare: which objects are the same, too."""
    seen = {} if seen is None else seen
    if isinstance(value, torch.Tensor):
        assert type(value) in (torch.Tensor, nn.Parameter), type(value)
        number = seen.setdefault(id(value), len(seen))
        return "tensor", number, value.tolist(), value.requires_grad, value.is_leaf, value._version
    if isinstance(value, (int, float, str, type(None), type, enum.Enum, types.FunctionType, nn.Module)):
        return repr(value).split(" at ")[0]
    if id(value) in seen:
        return "again", seen[id(value)]
    seen[id(value)] = len(seen)
    keep.append(value)
    found = [type(value).__name__]
    if isinstance(value, weakref.ref):
        return [*found, shown(value(), seen)]
    if isinstance(value, dict):
        found += [(shown(key, seen), shown(dict.__getitem__(value, key), seen)) for key in dict.keys(value)]
    elif isinstance(value, (list, tuple, collections.deque)):
        found += [shown(item, seen) for item in iter(value)]
    elif isinstance(value, set):
        found += sorted(value)
    found += [(name, shown(item, seen)) for name, item in getattr(value, "__dict__", {}).items()]
    for base in type(value).__mro__:
        for name, item in vars(base).items():
            if isinstance(item, types.MemberDescriptorType) and hasattr(value, name) and name != "__dict__":
                found.append((name, shown(getattr(value, name), seen)))
    return found


keep = []  # so that ids stay theirs


def run(text, name, wrap):
    world = world_of(text, name)
    call, found = wrap(world["step"]), []
    torch.manual_seed(1)
    for i in range(7):
        given = world["give"](i)
        result = call(**given) if isinstance(given, dict) else call(*given)
        parts = [shown([given, result])] if "seen" not in world else [shown(given), world["seen"](given, result)]
        if isinstance(result, torch.Tensor) and result.requires_grad:
            result.sum().backward()
            parts.append(shown([given]))
        found.append((parts, torch.rand(()).item()))
    keep.clear()
    return found, call


def check(text, name):
    """(what eager gives, what the compiled function gives, how many calls ran eagerly, graphs)."""
    expected, _ = run(text, name, lambda function: function)
    found, call = run(text, name, lambda f: foregrad.compile(f, backend="eager", on_unsupported="eager"))
    report = foregrad.explain_recompiles(call)
    return expected, found, report.eager_calls, len(report)
