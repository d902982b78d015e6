"""Programs as people write them: containers that calls add to. See `user_programs`."""

CONTAINERS = {
    "hook collects activations": """
def make():
    acts = []
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    for layer in model:
        layer.register_forward_hook(lambda module, given, out: acts.append(out.detach()))
    return model, lambda: acts
""",
    "hook collects into a dict of lists": """
def make():
    acts = collections.defaultdict(list)
    def save(name):
        def hook(module, given, out):
            acts[name].append(out.detach().mean())
        return hook
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    for name, layer in model.named_children():
        layer.register_forward_hook(save(name))
    return model, lambda: acts
""",
    "loss history": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.losses = []
    def forward(self, x):
        loss = self.linear(x).pow(2).mean()
        self.losses.append(loss.item())
        return loss
def make():
    model = Model()
    return model, lambda: model.losses
""",
    "history of tensors": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.history = {"mean": [], "std": []}
    def forward(self, x):
        y = self.linear(x)
        self.history["mean"].append(y.mean().detach())
        self.history["std"].append(y.std().detach())
        return y
def make():
    model = Model()
    return model, lambda: model.history
""",
    "history by step": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.step = 0
        self.history = {}
    def forward(self, x):
        loss = self.linear(x).pow(2).mean()
        self.history[self.step] = loss.item()
        self.step += 1
        return loss
def make():
    model = Model()
    return model, lambda: (model.step, model.history)
""",
    "a deque of recent losses": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.recent = collections.deque(maxlen=3)
    def forward(self, x):
        loss = self.linear(x).pow(2).mean()
        self.recent.append(loss.detach())
        return loss
def make():
    model = Model()
    return model, lambda: model.recent
""",
    "counter of kinds": """
counts = collections.Counter()
def step(x):
    counts["train" if x.requires_grad else "test"] += 1
    return (x * 2).sum()
def make():
    return step, lambda: counts
""",
    "counter updated": """
counts = collections.Counter()
def step(x, kind="a"):
    counts.update([kind, "all"])
    return (x * 2).sum()
def make():
    return step, lambda: counts
""",
    "set of seen shapes": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.seen = set()
    def forward(self, x):
        self.seen.add(tuple(x.shape))
        return self.linear(x)
def make():
    model = Model()
    return model, lambda: sorted(model.seen)
""",
    "cleared and filled": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.hidden = []
    def forward(self, x):
        self.hidden.clear()
        for layer in self.layers:
            x = layer(x).tanh()
            self.hidden.append(x)
        return x
def make():
    model = Model()
    return model, lambda: model.hidden
""",
    "a new list filled": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
    def forward(self, x):
        self.hidden = []
        for layer in self.layers:
            x = layer(x).tanh()
            self.hidden.append(x)
        return x
def make():
    model = Model()
    return model, lambda: model.hidden
""",
    "losses of layers, summed by the caller": """
class Block(nn.Module):
    def __init__(self, aux):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.aux = aux
    def forward(self, x):
        y = self.linear(x)
        self.aux.append(y.pow(2).mean())
        return y.relu()
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.aux = []
        self.blocks = nn.Sequential(Block(self.aux), Block(self.aux))
    def forward(self, x):
        self.aux.clear()
        y = self.blocks(x)
        return y.sum() + 0.1 * sum(self.aux)
def make():
    model = Model()
    return model, lambda: model.aux
""",
    "attention maps kept": """
class Attention(nn.Module):
    def __init__(self, store):
        super().__init__()
        self.q, self.k = nn.Linear(3, 3), nn.Linear(3, 3)
        self.store = store
    def forward(self, x):
        weights = (self.q(x) @ self.k(x).T).softmax(-1)
        self.store.maps.append(weights.detach())
        return weights @ x
class Store:
    def __init__(self):
        self.maps = []
def make():
    store = Store()
    return nn.Sequential(Attention(store), Attention(store)), lambda: store.maps
""",
    "a global log of rows": """
log = []
def step(x):
    y = (x * 3).tanh()
    log.append({"mean": y.mean().item(), "shape": tuple(y.shape)})
    return y
def make():
    return step, lambda: log
""",
    "a list under a local name": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norms = []
    def forward(self, x):
        norms = self.norms
        y = self.linear(x)
        norms.append(y.norm().detach())
        norms.append(x.norm().detach())
        return y
def make():
    model = Model()
    return model, lambda: model.norms
""",
    "extended": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.kept = []
    def forward(self, x):
        y = self.linear(x)
        self.kept.extend([y.min().detach(), y.max().detach()])
        self.kept += [y.mean().detach()]
        return y
def make():
    model = Model()
    return model, lambda: model.kept
""",
    "a list that is read": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.kept = []
    def forward(self, x):
        y = self.linear(x)
        self.kept.append(y.mean().detach())
        return y * len(self.kept)
def make():
    model = Model()
    return model, lambda: model.kept
""",
    "written by one, read by another": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.kept = []
    def note(self, y):
        self.kept.append(y.mean().detach())
    def scale(self):
        return 2.0 if len(self.kept) > 3 else 1.0
    def forward(self, x):
        y = self.linear(x)
        self.note(y)
        return y * self.scale()
def make():
    model = Model()
    return model, lambda: model.kept
""",
    "read under another name": """
shared = []
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.kept = shared
    def forward(self, x):
        y = self.linear(x)
        self.kept.append(y.mean().detach())
        return y * len(shared)
def make():
    model = Model()
    return model, lambda: model.kept
""",
    "read by a partial function": """
def scale(items, y):
    return y * len(items)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.kept = []
        self.scaled = functools.partial(scale, self.kept)
    def forward(self, x):
        y = self.linear(x)
        self.kept.append(y.mean().detach())
        return self.scaled(y)
def make():
    model = Model()
    return model, lambda: model.kept
""",
    "read by a made-up name": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.kept_a = []
        self.kind = "a"
    def forward(self, x):
        y = self.linear(x)
        self.kept_a.append(y.mean().detach())
        return y * len(getattr(self, "kept_" + self.kind))
def make():
    model = Model()
    return model, lambda: model.kept_a
""",
    "stacked frames": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.frames = collections.deque(maxlen=4)
        self.linear = nn.Linear(3, 3)
    def forward(self, x):
        self.frames.append(x.detach())
        return self.linear(x) + torch.stack(list(self.frames)).mean(0)
def make():
    model = Model()
    return model, lambda: model.frames
""",
    "a window that slides": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.window = []
    def forward(self, x):
        y = self.linear(x)
        self.window.append(y.mean().detach())
        if len(self.window) > 2:
            self.window.pop(0)
        return y - torch.stack(self.window).mean()
def make():
    model = Model()
    return model, lambda: model.window
""",
    "emptied by the caller": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.kept = []
    def forward(self, x):
        y = self.linear(x)
        self.kept.append(y.mean().detach())
        return y
def make():
    model = Model()
    def look():
        found = list(model.kept)
        if len(found) == 2:
            model.kept.clear()
        if len(found) == 1:
            model.kept = found
        return found
    return model, look
""",
    "memory bank": """
class Bank(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(3, 3)
        self.register_buffer("queue", torch.zeros(8, 3))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))
    @torch.no_grad()
    def enqueue(self, keys):
        pointer = int(self.pointer)
        self.queue[pointer : pointer + keys.shape[0]] = keys
        self.pointer[0] = (pointer + keys.shape[0]) % 8
    def forward(self, x):
        q = F.normalize(self.encoder(x), dim=1)
        logits = q @ self.queue.clone().T
        self.enqueue(q.detach())
        return logits.logsumexp(1).mean()
def make():
    model = Bank()
    return model, lambda: (model.queue, model.pointer)
""",
    "running mean": """
class Normalize(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.count = torch.zeros(3), 0
        self.linear = nn.Linear(3, 3)
    def forward(self, x):
        if self.training:
            self.count += 1
            self.mean = self.mean + (x.detach().mean(0) - self.mean) / self.count
        return self.linear(x - self.mean)
def make():
    model = Normalize()
    return model, lambda: (model.mean, model.count)
""",
    "codebook": """
class Quantizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.arange(12.0).reshape(4, 3) / 6)
        self.register_buffer("sizes", torch.ones(4))
        self.scale = nn.Parameter(torch.ones(3))
        self.usage = collections.Counter()
        self.perplexities = []
    def forward(self, x):
        z = x * self.scale
        index = torch.cdist(z, self.codes).argmin(1)
        hot = F.one_hot(index, 4).float()
        with torch.no_grad():
            self.sizes.mul_(0.9).add_(hot.sum(0), alpha=0.1)
            self.codes.copy_(0.9 * self.codes + 0.1 * (hot.T @ z) / self.sizes[:, None])
            p = hot.mean(0)
            self.perplexities.append(torch.exp(-(p * (p + 1e-9).log()).sum()))
        quantized = self.codes[index]
        return z + (quantized - z).detach()
def make():
    model = Quantizer()
    return model, lambda: (model.codes, model.sizes, model.perplexities)
""",
    "average of weights": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.shadow = {name: p.detach().clone() for name, p in self.linear.named_parameters()}
    def forward(self, x):
        for name, p in self.linear.named_parameters():
            self.shadow[name] = 0.9 * self.shadow[name] + 0.1 * p.detach()
        return self.linear(x)
def make():
    model = Model()
    return model, lambda: model.shadow
""",
}
