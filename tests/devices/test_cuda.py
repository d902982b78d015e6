"""Programs on a GPU: values, gradients, random state and memory are eager's, as they are on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import foregrad

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:.*non-deterministic algorithm:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*deterministic implementation:UserWarning"),
    pytest.mark.filterwarnings(r"ignore:\s*Online softmax is disabled:UserWarning"),  # by Inductor, for few rows
]
DEVICE = torch.device("cuda")
BACKENDS = ["eager", "inductor"]


@pytest.fixture(autouse=True)
def same_kernels():
    """Kernels that add in any order would differ from themselves."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


def tensors_of(value):
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def run(function, arguments, *, calls):
    """What each call returns, the gradients that it leaves, and the state of both generators at the end."""
    torch.manual_seed(0)
    seen = []
    for _ in range(calls):
        leaves = [a for a in arguments if isinstance(a, torch.Tensor) and a.requires_grad]
        results = tensors_of(function(*arguments))
        for leaf in leaves:
            leaf.grad = None
        loss = [r.float().square().mean() for r in results if r.requires_grad]
        if loss:
            torch.stack([part.to(DEVICE) for part in loss]).sum().backward()
        seen.append(([r.detach().clone() for r in results], [leaf.grad for leaf in leaves]))
    return seen, torch.get_rng_state(), torch.cuda.get_rng_state()


def compare(function, arguments, *, backend="eager", calls=3):
    expected = run(function, copied(arguments), calls=calls)
    actual = run(foregrad.compile(function, backend=backend), copied(arguments), calls=calls)
    bitwise = {"rtol": 0, "atol": 0, "equal_nan": True} if backend == "eager" else {"rtol": 2e-4, "atol": 2e-5}
    torch.testing.assert_close(actual[0], expected[0], check_stride=True, **bitwise)
    assert torch.equal(actual[1], expected[1])
    assert torch.equal(actual[2], expected[2])


def copied(arguments):
    return [a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in arguments]


def leaf(*shape, dtype=torch.float32, device=DEVICE):
    return torch.randn(shape, dtype=dtype, device=device).requires_grad_()


def dropout(x, w):
    return F.dropout(torch.tanh(x @ w), 0.3) * torch.rand_like(x)


def crosses_devices(x, w):
    return (x.cpu() * 2).to(x.device) @ w + w.to("cpu", non_blocking=True).sum()


def draws_on_both(x, w):
    return x @ w + torch.rand(x.shape[0], 1).to(x.device) + torch.rand(1, device=x.device)


def writes(x, w):
    y = x * 2
    y[:, 1:3].mul_(w[0, 0])
    y.t().add_(1)
    return y, y[0]


def attention(x, w):
    q = (x @ w).view(1, 2, 8, 8)
    return F.scaled_dot_product_attention(q, q * 2, q + 1, is_causal=True)


def autocasts(x, w):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return F.layer_norm(F.gelu(x @ w), (16,)).float()


def has_scalars_of_the_cpu(x, w):
    return x * torch.tensor(2.0) + w.sum() * torch.tensor(3.0, dtype=torch.float64)


def indexes(x, w):
    return w[torch.arange(8, device=x.device) % 4] + F.embedding(
        torch.tensor([1, 1, 3, 0, 2, 2, 5, 7], device=x.device), w
    )


def branches(x, w):
    return x @ w if x.detach().sum().item() > 1e9 else torch.cos(x) @ w


def second_derivative(x, w):
    (slope,) = torch.autograd.grad(torch.tanh(x @ w).sum(), x, create_graph=True)
    return slope.square()


def checkpointed(x, w):
    return torch.utils.checkpoint.checkpoint(lambda x: F.dropout(torch.relu(x @ w), 0.5), x, use_reentrant=False)


PROGRAMS = [
    dropout,
    crosses_devices,
    draws_on_both,
    writes,
    attention,
    autocasts,
    has_scalars_of_the_cpu,
    indexes,
    branches,
    second_derivative,
    checkpointed,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_program(program):
    compare(program, [leaf(8, 16), leaf(16, 16)])


@pytest.mark.parametrize(
    "program",
    [p for p in PROGRAMS if p not in (dropout, draws_on_both, checkpointed, autocasts)],
    ids=lambda p: p.__name__,
)
def test_program_with_triton(program):
    compare(program, [leaf(8, 16), leaf(16, 16)], backend="inductor")


def test_half_precision_with_triton():
    """What is computed in half precision is compared with its own rounding."""
    x, w = leaf(8, 16), leaf(16, 16)
    torch.testing.assert_close(
        foregrad.compile(autocasts, backend="inductor")(x, w), autocasts(x, w), rtol=2e-2, atol=2e-2
    )


def test_dropout_with_triton_keeps_the_rate_and_its_mask():
    x = torch.ones(1 << 16, device=DEVICE, requires_grad=True)
    kept = foregrad.compile(lambda x: F.dropout(x * 1.0, 0.25), backend="inductor")(x)
    kept.sum().backward()
    assert 0.7 < (kept != 0).float().mean().item() < 0.8
    assert torch.equal(x.grad != 0, kept != 0)


LAYERS = {
    "conv": (lambda: nn.Conv2d(3, 4, 3, stride=2, padding=1), (2, 3, 9, 9)),
    "conv and batch norm": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), (2, 3, 8, 8)),
    "transposed conv": (lambda: nn.ConvTranspose2d(3, 4, 3), (2, 3, 5, 5)),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), (2, 5, 16)),
    "encoder layer, eval": (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval(), (2, 5, 16)),
    "multi-head attention": (lambda: SelfAttention(), (2, 5, 16)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (2, 4, 6)),
    "channels last": (lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), (2, 3, 8, 8)),
}


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, dropout=0.1)

    def forward(self, x):
        return self.attention(x, x, x)


@pytest.mark.parametrize("name", LAYERS)
def test_layer(name):
    """Three steps of a layer: results, gradients of parameters, buffers and random states."""
    make, shape = LAYERS[name]
    torch.manual_seed(1)
    layer = make().to(DEVICE)
    other = copy.deepcopy(layer)
    x = torch.randn(shape, device=DEVICE)
    seen = []
    for module in (layer, other):
        call = module if module is layer else foregrad.compile(module, backend="eager")
        torch.manual_seed(0)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = sum(r.square().mean() for r in tensors_of(call(x)))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        seen.append((losses, dict(module.named_parameters()), dict(module.named_buffers()), torch.cuda.get_rng_state()))
    torch.testing.assert_close(seen[1], seen[0], rtol=0, atol=0)


def test_recurrent_layers_of_cudnn_run_eagerly_by_name():
    layer = nn.LSTM(16, 8, batch_first=True).to(DEVICE)
    x = torch.randn(2, 5, 16, device=DEVICE)
    with pytest.raises(foregrad.errors.UnsupportedMutationError, match="cuDNN"):
        foregrad.compile(layer, backend="eager", on_unsupported="raise")(x)
    with pytest.warns(foregrad.errors.ForegradWarning, match="cuDNN"):
        result = foregrad.compile(layer, backend="eager", on_unsupported="eager")(x)
    torch.testing.assert_close(result, layer(x), rtol=0, atol=0)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd, fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw, capturable": lambda p: torch.optim.AdamW(p, lr=0.01, capturable=True),
    "adam, one by one": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


def whole_step(model, optimizer, scaler=None):
    def step(x):
        optimizer.zero_grad()
        if scaler is None:
            loss = model(x).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        else:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(x).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return loss.detach()

    return step


@pytest.mark.filterwarnings("ignore::foregrad.errors.ForegradWarning")
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_whole_step(name, scaled):
    """Ten steps with backward, clipping and optimizer in the compiled function."""
    seen = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 4)).to(DEVICE)
        optimizer = OPTIMIZERS[name](model.parameters())
        scaler = torch.amp.GradScaler("cuda") if scaled else None
        step = whole_step(model, optimizer, scaler)
        step = foregrad.compile(step, backend="eager", on_unsupported="eager") if compiled else step
        losses = [step(torch.randn(8, 16, device=DEVICE)) for _ in range(10)]
        state = [v for _, v in sorted(optimizer.state_dict()["state"].items())]
        seen.append((losses, list(model.parameters()), state, torch.cuda.get_rng_state()))
    torch.testing.assert_close(seen[1], seen[0], rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_streams(backend):
    """A call on another stream runs there: what the caller's stream computed before is waited for by the caller alone."""
    x, w = leaf(512, 512), leaf(512, 512)
    compiled = foregrad.compile(lambda x, w: torch.tanh(x @ w) @ w, backend=backend)
    compiled(x, w).sum().backward()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        result = compiled(x, w)
    torch.cuda.current_stream().wait_stream(side)
    torch.testing.assert_close(result, torch.tanh(x @ w) @ w, rtol=1e-3, atol=1e-3)


def test_cuda_graph_of_a_compiled_call():
    """A compiled forward without gradient is recorded by a CUDA graph: it makes no synchronization."""
    w = torch.randn(64, 64, device=DEVICE)
    compiled = foregrad.compile(lambda x: torch.relu(x @ w) + 1, backend="eager")
    x = torch.randn(8, 64, device=DEVICE)
    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                compiled(x)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = compiled(x)
        x.copy_(torch.randn(8, 64, device=DEVICE))
        graph.replay()
    torch.testing.assert_close(result, torch.relu(x @ w) + 1, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # PyTorch's first one is
def test_reduce_overhead():
    """CUDA graphs by Inductor: steps with gradients, whose memory the next call takes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)).to(DEVICE)
    other = copy.deepcopy(model)
    torch._dynamo.reset()
    compiled = torch.compile(other, backend="foregrad", mode="reduce-overhead")
    for _ in range(4):
        x = torch.randn(16, 64, device=DEVICE)
        seen = []
        for module, call in ((model, model), (other, compiled)):
            module.zero_grad()
            loss = call(x).square().mean()
            loss.backward()
            seen.append([loss.detach().clone(), *(p.grad.clone() for p in module.parameters())])
        torch.testing.assert_close(seen[1], seen[0], rtol=1e-3, atol=1e-5)


def test_behind_dynamo():
    torch._dynamo.reset()
    x, w = leaf(8, 16), leaf(16, 16)
    expected = torch.tanh(x @ w)
    actual = torch.compile(lambda x, w: torch.tanh(x @ w), backend="foregrad")(x, w)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_saved_memory_is_released():
    """After forward and backward a call holds no more of the device's memory than eager does."""

    def step(function):
        x, w = leaf(256, 256), leaf(256, 256)
        result = function(x, w)
        result.sum().backward()
        del result
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    def program(x, w):
        return torch.tanh(torch.tanh(x @ w) @ w)

    compiled = foregrad.compile(program, backend="eager")
    for function in (program, compiled):
        step(function)
    before = torch.cuda.memory_allocated()
    assert step(compiled) - before == step(program) - before


def test_memory_budget():
    """With a budget less is saved between forward and backward."""

    def program(x, w):
        for _ in range(8):
            x = torch.tanh(x @ w)
        return x

    x, w = leaf(256, 256), leaf(256, 256)
    saved = {}
    for name, options in {"all": {}, "half": {"memory_budget": 0.5}}.items():
        compiled = foregrad.compile(program, backend="eager", **options)
        compiled(x, w).sum().backward()
        before = torch.cuda.memory_allocated()
        result = compiled(x, w)
        saved[name] = torch.cuda.memory_allocated() - before
        result.sum().backward()
        del result
    assert saved["half"] < saved["all"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_dynamic_sizes(backend):
    compiled = foregrad.compile(lambda x, w: F.softmax(x @ w, -1), backend=backend, dynamic=True)
    w = leaf(16, 16)
    for rows in (3, 5, 9):
        x = leaf(rows, 16)
        torch.testing.assert_close(compiled(x, w), F.softmax(x @ w, -1), rtol=1e-4, atol=1e-5)


def test_a_device_is_guarded():
    """The same function on the CPU is another graph."""
    compiled = foregrad.compile(lambda x: torch.zeros(2, device=x.device) + x, backend="eager")
    assert compiled(torch.ones(2, device=DEVICE)).device.type == "cuda"
    assert compiled(torch.ones(2)).device.type == "cpu"


def test_current_device_and_tensor_core_settings_are_guarded():
    """A setting that chooses kernels makes another graph or is read in each call: results are eager's of the moment."""
    x, w = leaf(256, 256), leaf(256, 256)
    compiled = foregrad.compile(lambda x, w: x @ w, backend="eager")
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        for allowed in (False, True, False):
            torch.backends.cuda.matmul.allow_tf32 = allowed
            torch.testing.assert_close(compiled(x, w), x @ w, rtol=0, atol=0)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def test_explain_measures_the_device():
    """The allocator rounds sizes up, and cuBLAS keeps a workspace: the peak is the predicted one, roughly."""
    model = nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512)).to(DEVICE)
    explained = foregrad.explain(model, torch.randn(2048, 512, device=DEVICE), backend="eager")
    assert explained.memory.measured_peak > 0
    assert explained.memory.measured_peak == pytest.approx(explained.memory.predicted_peak, rel=0.2)


def test_an_artifact_is_loaded_on_the_device(tmp_path):
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh()).to(DEVICE)
    x = torch.randn(4, 16, device=DEVICE)
    foregrad.export(model, (x,)).save(tmp_path / "model.fgrad")
    loaded = foregrad.load(tmp_path / "model.fgrad")
    torch.testing.assert_close(loaded(x), model(x), rtol=0, atol=0)
