"""Programs as people write them: random numbers and arrays. See `user_programs`."""

DRAWN = {
    "mixup": """
def step(x):
    lam = np.random.beta(0.4, 0.4)
    index = np.random.permutation(x.shape[0])
    return lam * x + (1 - lam) * x[index]
""",
    "an array of noise": """
def step(x):
    noise = np.random.randn(*x.shape).astype("float32")
    return x + torch.from_numpy(noise) * 0.1
""",
    "torch.tensor of an array": """
def step(x):
    return x * torch.tensor(np.random.rand(3), dtype=x.dtype)
""",
    "as_tensor": """
rng = np.random.default_rng(3)
def step(x):
    return x + torch.as_tensor(rng.normal(0.0, 2.0, size=(2, 3)), dtype=torch.float32)
""",
    "gumbel with numpy": """
def step(x):
    u = np.random.uniform(size=tuple(x.shape))
    g = -np.log(-np.log(u + 1e-9) + 1e-9)
    return F.softmax((x + torch.from_numpy(g).float()) / 0.5, dim=-1)
""",
    "generator's number": """
rng = np.random.default_rng(3)
def step(x):
    return x * rng.random() + rng.uniform(0, 1)
""",
    "generator's permutation": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(0)
        self.linear = nn.Linear(3, 3)
    def forward(self, x):
        order = torch.from_numpy(self.rng.permutation(x.shape[0]))
        return self.linear(x[order])
def make():
    model = Model()
    return model, lambda: model.rng.bit_generator.state["state"]
""",
    "masked by an array": """
def step(x):
    keep = np.random.rand(*x.shape) > 0.3
    return x.masked_fill(torch.from_numpy(~keep), 0.0)
""",
    "masked by chance, in numbers": """
def step(x):
    mask = (np.random.rand(3) < 0.5).astype(np.float32)
    return x * torch.from_numpy(mask)
""",
    "choice of numpy": """
def step(x):
    return x[:, np.random.choice(3, size=2, replace=False)]
""",
    "random crop": """
def step(x):
    i = np.random.randint(0, x.shape[0])
    j = random.randint(0, 1)
    return x[i:, j : j + 2].mean()
""",
    "random crop of a size": """
def step(x):
    j = random.randint(0, 1)
    return x[:, j : j + 2]
""",
    "random flip": """
def step(x):
    if random.random() < 0.5:
        x = torch.flip(x, [-1])
    return x * 1.5
""",
    "stochastic depth": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
    def forward(self, x):
        for i, layer in enumerate(self.layers):
            if self.training and random.random() < 0.2 * i:
                continue
            x = x + layer(x).relu()
        return x
def make():
    return Model(), lambda: None
""",
    "shuffled list": """
def step(x):
    rows = list(range(x.shape[0]))
    random.shuffle(rows)
    return x[rows]
""",
    "shuffled objects": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Tanh(), nn.Softplus()])
    def forward(self, x):
        layers = list(self.layers)
        random.shuffle(layers)
        for layer in layers:
            x = layer(x)
        return x
def make():
    return Model(), lambda: None
""",
    "chosen layer": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Tanh(), nn.Softplus()])
    def forward(self, x):
        return random.choice(list(self.layers))(x)
def make():
    return Model(), lambda: None
""",
    "weighted choice": """
def step(x):
    kind = random.choices(["sin", "cos", "tanh"], weights=[1, 2, 3])[0]
    return getattr(x, kind)()
""",
    "sample": """
def step(x):
    return x[:, random.sample(range(3), 2)]
""",
    "generator of its own": """
class Augment:
    def __init__(self):
        self.rng = random.Random(5)
    def __call__(self, x):
        return x * self.rng.uniform(0.5, 1.5) + self.rng.gauss(0, 1)
def make():
    augment = Augment()
    return (lambda x: augment(x)), lambda: augment.rng.getstate()[1][-1]
""",
    "a seeded generator made in the call": """
def step(x):
    rng = random.Random(7)
    return x * rng.random()
""",
    "a seeded generator of numpy made in the call": """
def step(x):
    rng = np.random.default_rng(7)
    return x * torch.from_numpy(rng.random(3)).float()
""",
    "legacy state": """
state = np.random.RandomState(3)
def step(x):
    return x + float(state.randn()) + torch.from_numpy(state.rand(3)).float()
""",
}
