"""Programs as people write them: objects and parameters that calls leave, and writes in a backward. See `user_programs`."""

OBJECTS = {
    "lazily built weight": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = None
    def forward(self, x):
        if self.w is None:
            self.w = nn.Parameter(torch.empty(x.shape[-1]).uniform_())
        return x * self.w
def make():
    model = Model()
    return model, lambda: model.w
""",
    "lazily built layer": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = None
    def forward(self, x):
        if self.net is None:
            self.net = nn.Linear(x.shape[-1], 2)
        return self.net(x)
def make():
    model = Model()
    return model, lambda: list(model.net.parameters())
""",
    "weight registered when missing": """
class Model(nn.Module):
    def forward(self, x):
        if not hasattr(self, "w"):
            self.register_parameter("w", nn.Parameter(torch.ones(x.shape[-1]) * 2))
        return x * self.w
def make():
    model = Model()
    return model, lambda: model.w
""",
    "lazy modules": """
def make():
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(2))
    return model, lambda: [p.detach() for p in model.parameters()]
""",
    "buffer registered in forward": """
class Model(nn.Module):
    def forward(self, x):
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.arange(x.shape[-1]).float())
        return x * self.mask
def make():
    model = Model()
    return model, lambda: model.mask
""",
    "rotary cache": """
class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.inv = 1.0 / (10 ** (torch.arange(0, 3) / 3))
        self.length = 0
    def forward(self, x):
        if x.shape[0] > self.length:
            self.length = x.shape[0]
            t = torch.arange(self.length)
            self.cos = torch.outer(t, self.inv).cos()
        return x * self.cos[: x.shape[0]]
def make():
    model = Rotary()
    return model, lambda: (model.length, model.cos)
""",
    "grids by size": """
class Grid(nn.Module):
    def __init__(self):
        super().__init__()
        self.grids = {}
    def forward(self, x):
        key = tuple(x.shape)
        if key not in self.grids:
            self.grids[key] = torch.linspace(0, 1, x.numel()).reshape(key)
        return x + self.grids[key]
def make():
    model = Grid()
    return model, lambda: model.grids
""",
    "a cache object": """
class Cache:
    def __init__(self, keys, values):
        self.keys, self.values = keys, values
        self.length = keys.shape[0]
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.k, self.v = nn.Linear(3, 3), nn.Linear(3, 3)
        self.cache = None
    def forward(self, x):
        self.cache = Cache(self.k(x).detach(), self.v(x).detach())
        return self.cache.keys @ x.T
def make():
    model = Model()
    return model, lambda: (type(model.cache).__name__, vars(model.cache))
""",
    "a dataclass left": """
@dataclasses.dataclass
class Stats:
    mean: torch.Tensor
    std: torch.Tensor
    name: str = "stats"
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.stats = None
    def forward(self, x):
        y = self.linear(x)
        self.stats = Stats(y.mean().detach(), y.std().detach())
        return y
def make():
    model = Model()
    return model, lambda: dataclasses.astuple(model.stats)
""",
    "a frozen dataclass with slots": """
@dataclasses.dataclass(frozen=True, slots=True)
class Stats:
    mean: float
    n: int
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.stats = Stats(0.0, 0)
    def forward(self, x):
        y = self.linear(x)
        self.stats = Stats(y.mean().item(), self.stats.n + 1)
        return y
def make():
    model = Model()
    return model, lambda: dataclasses.astuple(model.stats)
""",
    "a named tuple left": """
State = collections.namedtuple("State", "h c")
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(3, 3)
        self.state = None
    def forward(self, x):
        h, c = self.cell(x, self.state)
        self.state = State(h.detach(), c.detach())
        return h
def make():
    model = Model()
    return model, lambda: model.state
""",
    "a tuple of states": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(3, 3)
        self.state = None
    def forward(self, x):
        h, c = self.cell(x, self.state)
        self.state = (h.detach(), c.detach())
        return h
def make():
    model = Model()
    return model, lambda: model.state
""",
    "a dict of states": """
def make():
    w = nn.Parameter(torch.ones(3))
    state = {"h": torch.zeros(2, 3), "n": 0}
    def step(x):
        nonlocal state
        y = (x * w + state["h"]).tanh()
        state = {"h": 0.5 * y.detach(), "n": state["n"] + 1}
        return y * state["n"]
    return step, lambda: state
""",
    "a list of states": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.ModuleList(nn.RNNCell(3, 3) for _ in range(2))
        self.states = [torch.zeros(2, 3), torch.zeros(2, 3)]
    def forward(self, x):
        states = []
        for cell, state in zip(self.cells, self.states):
            x = cell(x, state)
            states.append(x.detach())
        self.states = states
        return x
    def reset(self):
        self.states = [torch.zeros(2, 3), torch.zeros(2, 3)]
def make():
    model = Model()
    return model, lambda: model.states
""",
    "a state with its history": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(3, 3)
        self.state = (torch.zeros(2, 3), "start")
    def forward(self, x):
        h = self.cell(x, self.state[0].detach())
        old, self.state = self.state, (h, "start")
        return h + old[0].detach()
def make():
    model = Model()
    return model, lambda: model.state
""",
    "an output class left": """
class Output(collections.OrderedDict):
    def __getattr__(self, name):
        return self[name]
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.last = None
    def forward(self, x):
        y = self.linear(x)
        self.last = Output(logits=y.detach(), probs=y.softmax(-1).detach())
        return y
def make():
    model = Model()
    return model, lambda: dict(model.last)
""",
    "a namespace left": """
def make():
    state = types.SimpleNamespace(last=None, calls=0)
    def step(x):
        y = (x * 2).tanh()
        state.calls += 1
        state.last = types.SimpleNamespace(y=y.detach(), top=y.max().item())
        return y
    return step, lambda: (state.calls, vars(state.last))
""",
    "objects in a list": """
class Node:
    def __init__(self, value, parent):
        self.value, self.parent = value, parent
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.tape = []
    def forward(self, x):
        y = self.linear(x)
        root = Node(x, None)
        self.tape = [root, Node(y.detach(), root)]
        return y
def make():
    model = Model()
    return model, lambda: (len(model.tape), model.tape[1].value, model.tape[1].parent is model.tape[0])
""",
    "rows of dataclasses": """
@dataclasses.dataclass
class Row:
    step: int
    loss: float
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.step, self.rows = 0, []
    def forward(self, x):
        loss = self.linear(x).pow(2).mean()
        self.rows.append(Row(self.step, loss.item()))
        self.step += 1
        return loss
def make():
    model = Model()
    return model, lambda: [dataclasses.astuple(row) for row in model.rows]
""",
    "a schedule that anneals": """
class Schedule:
    def __init__(self):
        self.step, self.history = 0, []
    def value(self):
        self.step += 1
        value = 0.5 * (1 + math.cos(math.pi * min(self.step / 10, 1.0)))
        self.history.append(value)
        return value
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.beta = Schedule()
    def forward(self, x):
        return self.linear(x) * self.beta.value()
def make():
    model = Model()
    return model, lambda: (model.beta.step, model.beta.history)
""",
}

BACKWARDS = {
    "a counter in a Function's backward": """
calls = {"backward": 0}
class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, g):
        calls["backward"] += 1
        return g * 2
def make():
    w = nn.Parameter(torch.ones(3))
    return (lambda x: Double.apply(x * w)), lambda: dict(calls)
""",
    "gradients kept by a hook": """
def make():
    grads = {}
    w = nn.Parameter(torch.ones(3))
    def step(x):
        y = x * w
        y.register_hook(lambda g: grads.__setitem__("y", g.detach()))
        return (y * 2).tanh()
    return step, lambda: dict(grads)
""",
    "gradients appended by a backward hook": """
def make():
    grads = []
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    model[0].register_full_backward_hook(lambda module, given, out: grads.append(out[0].norm()))
    return model, lambda: list(grads)
""",
}
