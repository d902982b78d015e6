"""Programs that read Python's state: places x ways to read x what happens between calls.

`python -m tests.python.reads` runs all of them, or every n-th (`--step n`), and says which are stale: answer otherwise
than the function itself after a change. Under torch.compile it is Dynamo's guards that see changes.
"""

from __future__ import annotations

import argparse
import itertools
import linecache
import sys
import types
import warnings
from typing import Any

import torch

import foregrad

# Each place: what makes it (INIT is what is there first), what code is handed (`R`), and how it gets from there to the
# value; a second spelling is for writing.
PLACES = {
    "object": ("class Plain: pass\nroot = Plain()\nroot.a = INIT", "R.a"),
    "slot": ("class Slots:\n    __slots__ = ('a',)\nroot = Slots()\nroot.a = INIT", "R.a"),
    "class": ("class Plain:\n    a = INIT\nroot = Plain", "R.a"),
    "class of object": ("class Plain:\n    a = INIT\nroot = Plain()", "R.a", "type(root).a"),
    "base class": ("class Base:\n    a = INIT\nclass Plain(Base): pass\nroot = Plain()", "R.a", "Base.a"),
    "metaclass": (
        ("class Meta(type):\n    a = INIT\nclass Plain(metaclass=Meta): pass\nroot = Plain"),
        "R.a",
        "Meta.a",
    ),
    "property": (
        "class Plain:\n    @property\n    def a(self): return self.hidden\nroot = Plain()\nroot.hidden = INIT",
        "R.a",
        "root.hidden",
    ),
    "attribute by method": (
        (
            "class Plain:\n    def __getattr__(self, name): return self.__dict__['table'][name]\n"
            "root = Plain()\nroot.__dict__['table'] = {'a': INIT}"
        ),
        "R.a",
        "root.__dict__['table']['a']",
    ),
    "item by method": (
        "class Plain:\n    def __getitem__(self, key): return self.table[key]\nroot = Plain()\nroot.table = {'a': INIT}",
        "R['a']",
        "root.table['a']",
    ),
    "descriptor": (
        (
            "class D:\n    def __get__(self, obj, cls): return STORE['a']\nSTORE = {'a': INIT}\n"
            "class Plain:\n    a = D()\nroot = Plain()"
        ),
        "R.a",
        "STORE['a']",
    ),
    "method": ("class Plain:\n    def get(self): return self.a\nroot = Plain()\nroot.a = INIT", "R.get()", "root.a"),
    "call": ("class Plain:\n    def __call__(self): return self.a\nroot = Plain()\nroot.a = INIT", "R()", "root.a"),
    "object in object": ("class Plain: pass\nroot = Plain()\nroot.b = Plain()\nroot.b.a = INIT", "R.b.a"),
    "object in list": ("class Plain: pass\nroot = [0, Plain()]\nroot[1].a = INIT", "R[1].a"),
    "object in dict": ("class Plain: pass\nroot = {'o': Plain()}\nroot['o'].a = INIT", "R['o'].a"),
    "dict": ("root = {'k': INIT, 'z': 1}", "R['k']"),
    "dict with get": ("root = {'k': INIT}", "R.get('k', 9)", "root['k']"),
    "nested dict": ("root = {'u': {'k': INIT}}", "R['u']['k']"),
    "attribute dict": (
        ("class Table(dict):\n    __getattr__ = dict.__getitem__\nroot = Table(a=INIT)"),
        "R.a",
        "root['a']",
    ),
    "dict without key": (
        "class Table(dict):\n    def __missing__(self, key): return STORE[0]\nSTORE = [INIT]\nroot = Table()",
        "R['k']",
        "STORE[0]",
    ),
    "ordered dict": ("root = collections.OrderedDict(k=INIT)", "R['k']"),
    "default dict": ("root = collections.defaultdict(int, k=INIT)", "R['k']"),
    "chain map": ("root = collections.ChainMap({'x': 1}, {'k': INIT})", "R['k']", "root.maps[1]['k']"),
    "user dict": ("root = collections.UserDict(k=INIT)", "R['k']"),
    "view of a dict": ("STORE = {'k': INIT}\nroot = types.MappingProxyType(STORE)", "R['k']", "STORE['k']"),
    "list": ("root = [7, INIT]", "R[1]"),
    "end of a list": ("root = [7, INIT]", "R[-1]"),
    "subclass of list": ("class Row(list): pass\nroot = Row([INIT])", "R[0]"),
    "deque": ("root = collections.deque([7, INIT])", "R[1]"),
    "tuple in list": ("root = [(1, INIT)]", "R[0][1]", "root[0]", "(1, T)"),
    "named tuple": ("N = collections.namedtuple('N', 'a b')\nroot = [N(INIT, 1)]", "R[0].a", "root[0]", "N(T, 1)"),
    "namespace": ("root = types.SimpleNamespace(a=INIT)", "R.a"),
    "parsed arguments": ("root = argparse.Namespace(a=INIT)", "R.a"),
    "dataclass": ("@dataclasses.dataclass\nclass D:\n    a: object\nroot = D(INIT)", "R.a"),
    "factory of a dataclass": (
        (
            "STORE = [INIT]\n@dataclasses.dataclass\nclass D:\n"
            "    a: object = dataclasses.field(default_factory=lambda: STORE[0])\nroot = D"
        ),
        "R().a",
        "STORE[0]",
    ),
    "attribute of function": ("def root(): pass\nroot.a = INIT", "R.a"),
    "default": ("def root(k=INIT): return k", "R()", "root.__defaults__", "(T,)"),
    "keyword default": ("def root(*, k=INIT): return k", "R()", "root.__kwdefaults__", "{'k': T}"),
    "global": ("def root(): return G\nG = INIT", "R()", "G"),
    "cell": (
        ("def made(k):\n    def get(): return k\n    return get\nroot = made(INIT)"),
        "R()",
        "root.__closure__[0].cell_contents",
    ),
    "partial": ("root = functools.partial(dict, k=INIT)", "R()['k']", "root.keywords['k']"),
    "bound method": (
        ("class Plain:\n    def get(self): return self.a\nobj = Plain()\nobj.a = INIT\nroot = obj.get"),
        "R()",
        "obj.a",
    ),
    "weak reference": ("class Plain: pass\nobj = Plain()\nobj.a = INIT\nroot = weakref.ref(obj)", "R().a", "obj.a"),
    "module": ("root = torch.nn.Module()\nroot.a = INIT", "R.a"),
    "class of a module": ("class Plain(torch.nn.Module):\n    a = INIT\nroot = Plain()", "type(R).a", "Plain.a"),
    "submodule": ("root = torch.nn.Module()\nroot.sub = torch.nn.Module()\nroot.sub.a = INIT", "R.sub.a"),
    "container of modules": ("root = torch.nn.ModuleList([torch.nn.Module()])\nroot[0].a = INIT", "R[0].a"),
    "object of module": ("class Plain: pass\nroot = torch.nn.Module()\nroot.o = Plain()\nroot.o.a = INIT", "R.o.a"),
    "dict of module": ("root = torch.nn.Module()\nroot.table = {'k': INIT}", "R.table['k']"),
    "context variable": ("root = contextvars.ContextVar('v')\nroot.set(INIT)", "R.get()", "root.set(T)"),
    "generator of": ("STORE = [INIT]\ndef root():\n    for item in STORE: yield item", "next(R())", "STORE[0]"),
    "python module": ("root = types.ModuleType('options')\nroot.a = INIT", "R.a"),
}

# How the function comes by it: `READ` reads the value from `root`, `READ_OF(o)` from what `o` is bound to.
WAYS = {
    "directly": "def f(x): return use(x, READ)",
    "by a helper": "def h(o): return READ_OF(o)\ndef f(x): return use(x, h(root))",
    "by two helpers": (
        "def g(o): return READ_OF(o)\ndef h(*args, **kw): return g(*args, **kw)\ndef f(x): return use(x, h(o=root))"
    ),
    "in a container": "bag = {'r': [root]}\ndef f(x):\n    o = bag['r'][0]\n    return use(x, READ_OF(o))",
    "of an object": (
        "class Holder:\n    def run(self, x):\n        o = self.o\n        return use(x, READ_OF(o))\n"
        "holder = Holder()\nholder.o = root\ndef f(x): return holder.run(x)"
    ),
    "in a closure": "def make(o):\n    def f(x): return use(x, READ_OF(o))\n    return f\nf = make(root)",
    "in a default": "def f(x, o=root): return use(x, READ_OF(o))",
    "in a lambda": "get = lambda o=root: READ_OF(o)\ndef f(x): return use(x, get())",
    "in a comprehension": "def f(x): return use(x, [READ_OF(o) for o in (root,)])",
    "in a generator": "def each():\n    yield READ\ndef f(x):\n    for v in each(): x = use(x, v)\n    return x",
    "by map": "def f(x): return use(x, list(map(lambda o: READ_OF(o), [root])))",
    "by a decorator": (
        "def wrap(fn):\n    @functools.wraps(fn)\n    def g(x): return fn(use(x, READ))\n    return g\n"
        "@wrap\ndef f(x): return x * 2"
    ),
    "by a partial": "def g(o, x): return use(x, READ_OF(o))\nf = functools.partial(g, root)",
    "in a hook": "f = torch.nn.Identity()\nf.register_forward_hook(lambda m, i, o: use(o, READ))",
    "in a module": (
        "class M(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.held = (root,)\n    def forward(self, x):\n        o = self.held[0]\n"
        "        return use(x, READ_OF(o))\nf = M()"
    ),
    "in the class of a module": (
        "class M(torch.nn.Module):\n    held = (root,)\n    def forward(self, x):\n        o = type(self).held[0]\n"
        "        return use(x, READ_OF(o))\nf = M()"
    ),
    "by a function of a module's class": (
        "class M(torch.nn.Module):\n    @staticmethod\n    def get(): return READ\n"
        "    def forward(self, x): return use(x, self.__class__.get())\nf = M()"
    ),
    "in a branch": "def f(x):\n    v = READ\n    if v == 2: return x * 2\n    return use(x, v)",
    "by its type": "def f(x): return use(x, type(READ).__name__)",
    "as text": "def f(x):\n    v = READ\n    return use(x, f'{v!r}')",
    "in try": (
        "def f(x):\n    try: v = READ\n"
        "    except (AttributeError, LookupError, TypeError, NameError): v = 'none'\n"
        "    return use(x, v)"
    ),
    "in match": (
        "def f(x):\n    match READ:\n        case 2: return x * 2\n        case str(): return x * 3\n"
        "        case v: return use(x, v)"
    ),
    "by a context": (
        "@contextlib.contextmanager\ndef scope():\n    yield READ\ndef f(x):\n    with scope() as v: return use(x, v)"
    ),
    "in a custom function": (
        "class F(torch.autograd.Function):\n    @staticmethod\n"
        "    def forward(ctx, x): return use(x, READ)\n    @staticmethod\n"
        "    def backward(ctx, g): return g * weight(READ)\ndef f(x): return F.apply(x)"
    ),
    "in a hook of a tensor": (
        "def f(x):\n    y = x * 1\n    y.register_hook(lambda g: g * weight(READ))\n    return y * 2"
    ),
}
# Ways that ask an object for a name, or a container for what it holds.
WAYS_OF_ATTRIBUTES = {
    "by getattr": "def f(x): return use(x, getattr(root, 'a', 'none'))",
    "by a made-up name": "def f(x): return use(x, getattr(root, chr(97), 'none'))",
    "by hasattr": "def f(x): return use(x, hasattr(root, 'a') and root.a)",
    "by attrgetter": "get = operator.attrgetter('a')\ndef f(x): return use(x, get(root))",
    "in a format": "def f(x): return use(x, '{0.a!r}'.format(root))",
    "in its table": "def f(x): return use(x, [v for k, v in vars(root).items() if k == 'a'])",
}
_OF_ATTRIBUTES = ("object", "class", "class of object", "base class", "namespace", "parsed arguments", "dataclass")
_OF_ATTRIBUTES += ("attribute of function", "module", "python module", "slot")
WAYS_OF_CONTAINERS = {
    "all of them": "def f(x): return use(x, list(root.values() if hasattr(root, 'values') else root))",
    "in its order": "def f(x): return use(x, list(root))",
    "unpacked": "def f(x): return use(x, [*root.values()] if hasattr(root, 'values') else [*root])",
    "its length": "def f(x): return use(x, len(root))",
    "is it there": "def f(x): return use(x, 3 in (root.values() if hasattr(root, 'values') else root))",
    "by max": "def f(x): return use(x, max(root.values() if hasattr(root, 'values') else root, key=repr))",
    "a copy": "def f(x): return use(x, copy.copy(root))",
    "sorted": "def f(x): return use(x, sorted(root.items() if hasattr(root, 'items') else root, key=repr))",
    "equal": "def f(x): return use(x, root == type(root)(root))",
    "as json": "def f(x): return use(x, repr(dict(root)) if hasattr(root, 'items') else repr([*root]))",
}
_CONTAINERS = ("dict", "ordered dict", "list", "subclass of list", "deque", "user dict")

# What is there first, and then, one after the other.
CHANGES = {
    "numbers": ("2", "3", "5"),
    "kinds of one": ("1", "True", "1.0", "(1,)", "(True,)"),
    "zeros": ("0.0", "-0.0", "0"),
    "texts": ("'a'", "'b'", "b'a'"),
    "options": ("None", "2", "None"),
    "lists": ("[1, 2]", "[1, 3]", "[1, 2, 3]", "(1, 2)"),
    "changed in place": ("[1, 2]", "@.append(3)", "@.pop(0)", "@.__setitem__(0, 2.5)"),
    "dicts": ("{'a': 1, 'b': 2}", "{'b': 2, 'a': 1}", "{'a': 1}"),
    "dict in place": ("{'a': 1, 'b': 2}", "@.update(a=3)", "@.pop('a')", "@.update(a=2)"),
    "sets": ("{1, 2}", "{1, 3}", "frozenset({1, 2})"),
    "not a number": ("1.5", "float('inf')", "float('nan')"),
}
HEAD = """
import argparse, collections, contextlib, contextvars, copy, dataclasses, functools, operator, types, weakref
import torch
def weight(value):
    text = repr(value)
    return float(sum((i + 1) * ord(c) for i, c in enumerate(text)) % 97 + 1)
def use(x, value): return x * weight(value)
"""

Program = tuple[str, str, str]


def programs() -> list[Program]:
    """All of them, by the names of the tables' rows."""
    found = list(itertools.product(PLACES, WAYS, CHANGES))
    found += itertools.product(_OF_ATTRIBUTES, WAYS_OF_ATTRIBUTES, CHANGES)
    found += itertools.product(_CONTAINERS, WAYS_OF_CONTAINERS, CHANGES)
    return found


def source_of(program: Program) -> tuple[str, list[str]]:
    """The program as a module's code, and statements that change what it reads."""
    place, way, change = program
    made, read, *written = PLACES[place]
    first, *then = CHANGES[change]
    function = {**WAYS, **WAYS_OF_ATTRIBUTES, **WAYS_OF_CONTAINERS}[way]
    while "READ_OF(" in function:
        before, _, after = function.partition("READ_OF(")
        name, _, after = after.partition(")")
        function = before + read.replace("R", name, 1) + after
    function = function.replace("READ", read.replace("R", "root", 1))
    target = written[0] if written else read.replace("R", "root", 1)
    value = written[1] if len(written) > 1 else "T"
    statements = []
    for text in then:
        if text.startswith("@"):
            statements.append(f"({read.replace('R', 'root', 1)}){text[1:]}")
        elif "(T)" in target:
            statements.append(target.replace("T", text))
        else:
            statements.append(f"{target} = {value.replace('T', text)}")
    return HEAD + made.replace("INIT", first) + "\n" + function, statements


def stale(program: Program) -> tuple[str | None, int]:
    """What differs from eager, if anything does; how many calls were eager."""
    source, changes = source_of(program)
    name = f"program_{abs(hash(program))}"
    module = types.ModuleType(name)
    module.__file__ = f"<{', '.join(program)}>"
    linecache.cache[module.__file__] = (len(source), None, source.splitlines(True), module.__file__)
    sys.modules[name] = module
    try:
        exec(compile(source, module.__file__, "exec"), vars(module))
        function: Any = module.f
        compiled = foregrad.compile(function, backend="eager", on_unsupported="eager")
        for change in ("pass", *changes):
            exec(change, vars(module))
            for _ in range(2):
                found = [_called(f) for f in (compiled, function)]
                if found[0] != found[1]:
                    return f"after `{change}`: {found[0]} for {found[1]}", 0
        return None, sum(e.count for e in foregrad.explain_recompiles(compiled).eager)
    finally:
        del sys.modules[name], linecache.cache[module.__file__]


def _called(function: Any) -> Any:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    try:
        y = function(x)
    except Exception as error:
        return type(error).__name__, str(error)[:200]
    return y.tolist(), torch.autograd.grad(y.sum(), x)[0].tolist()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--step", type=int, default=1, help="run every n-th program")
    parser.add_argument("--begin", type=int, default=0, help="from this one")
    options = parser.parse_args()
    chosen = programs()[options.begin :: options.step]
    warnings.simplefilter("ignore")
    differ, eager = 0, 0
    for program in chosen:
        what, eager_calls = stale(program)
        eager += eager_calls > 0
        if what is not None:
            differ += 1
            print(", ".join(program), "|", what, flush=True)
    print(f"{len(chosen)} programs: {differ} stale, {eager} with eager calls")
    return differ > 0


if __name__ == "__main__":
    sys.exit(main())
