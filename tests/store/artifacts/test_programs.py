"""A function that went through a file is the same as eager: values, gradients, writes, aliases, random numbers."""

from __future__ import annotations

import collections
import warnings

import pytest
import torch

import foregrad
from foregrad.errors import ArtifactCallError, ArtifactError
from tests.golden.functions import FUNCTIONS
from tests.parity.fuzz import GRAD_SLACK
from tests.parity.oracle import Mismatch, Refused, check
from tests.parity.programs import PROFILES, RandomChooser, grow
from tests.store.artifacts.through_a_file import loaded_again, through_a_file


@pytest.mark.parametrize("name", FUNCTIONS)
def test_ordinary_functions(name):
    f, _ = FUNCTIONS[name]()
    assert check(f, lambda: FUNCTIONS[name]()[1], compile=through_a_file) == "equal"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_graphs_and_the_bytes_come_back_as_they_were(name):
    f, args = FUNCTIONS[name]()
    artifact = foregrad.export(f, args)
    again = loaded_again(artifact).artifact
    assert str(again) == str(artifact)
    assert again.to_bytes() == artifact.to_bytes()


def verdict(program):
    f, make_args = program.load()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return check(f, make_args, compile=through_a_file, grad_slack=GRAD_SLACK)
    except Refused:
        return "refused"
    except Mismatch as error:
        if isinstance(error.__cause__, (ArtifactError, ArtifactCallError)):
            return "not stored"
        raise


@pytest.mark.parametrize("profile", PROFILES)
def test_random_programs(profile):
    """None differs, whatever shares memory or takes it over; hardly any is refused."""
    verdicts = collections.Counter(verdict(grow(RandomChooser(seed), PROFILES[profile])) for seed in range(12))
    assert verdicts["equal"] + verdicts["raised"] >= 11, verdicts


class Named(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(3, 3)
        self.register_buffer("kept", torch.ones(3))
        self.register_buffer("left", torch.ones(3), persistent=False)
        self.unused = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        self.scale = torch.tensor(2.0)  # no buffer: reached by itself

    def forward(self, x):
        return self.inner(x) * self.kept + self.left * self.scale


def test_the_state_has_its_names_and_kinds():
    module = Named()
    loaded = loaded_again(foregrad.export(module, (torch.ones(2, 3),)))
    assert [name for name in loaded.state_dict() if name != "scale"] == list(module.state_dict())
    assert [n for n, _ in loaded.named_parameters()] == [n for n, _ in module.named_parameters()]
    assert [p.requires_grad for p in loaded.parameters()] == [p.requires_grad for p in module.parameters()]
    assert {"kept", "left", "scale"} == {n for n, _ in loaded.named_buffers()}
    other = Named()
    torch.nn.init.ones_(other.inner.weight)
    loaded.load_state_dict({**other.state_dict(), "scale": torch.tensor(3.0)})
    x = torch.randn(2, 3)
    other.scale = torch.tensor(3.0)
    assert torch.equal(loaded(x), other(x))


def test_tied_weights_stay_tied():
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    module[1].weight = module[0].weight
    loaded = loaded_again(foregrad.export(module, (torch.ones(2, 3),)))
    assert list(loaded.state_dict()) == list(module.state_dict())
    assert loaded.get_submodule("0").weight is loaded.get_submodule("1").weight
    assert len(list(loaded.parameters())) == 3


def test_strides_and_shared_memory_of_the_state_come_back():
    module = torch.nn.Module()
    base = torch.randn(12)
    module.register_buffer("turned", torch.randn(3, 4).t())
    module.register_buffer("front", base[:8].view(2, 4))
    module.register_buffer("back", base[4:])
    module.register_buffer("complex", torch.randn(3, dtype=torch.complex128))
    module.register_buffer("narrow", torch.randn(3).bfloat16())
    module.register_buffer("empty", torch.empty(0, 3))
    module.forward = lambda x: x + 1
    loaded = loaded_again(foregrad.export(module, (torch.ones(2),)))
    for name, tensor in module.named_buffers():
        other = loaded.get_buffer(name)
        assert torch.equal(other, tensor), name
        assert (other.stride(), other.dtype) == (tensor.stride(), tensor.dtype)
    loaded.back.zero_()
    assert loaded.front[1].eq(0).all()
    assert loaded.front[0].ne(0).all()


scale = torch.tensor([2.0, 3.0], requires_grad=True)
offset = torch.tensor(1.0)


def with_closed_over(x):
    return (x * scale + offset).sum()


def test_closed_over_tensors_are_constants_that_train():
    loaded = loaded_again(foregrad.export(with_closed_over, (torch.ones(2),)))
    assert {n for n, _ in loaded.named_parameters()} == {"scale"}
    loaded(torch.tensor([5.0, 7.0])).backward()
    assert loaded.scale.grad.tolist() == [5.0, 7.0]


def test_closed_over_tensors_are_inputs_when_asked():
    loaded = loaded_again(foregrad.export(with_closed_over, (torch.ones(2),), closed_over="inputs"))
    mine = torch.tensor([1.0, 1.0], requires_grad=True)
    loss = loaded(torch.tensor([5.0, 7.0]), scale=mine, offset=torch.tensor(10.0))
    assert loss.item() == 32.0
    loss.backward()
    assert mine.grad.tolist() == [5.0, 7.0]
    with pytest.raises(ArtifactCallError, match=r"keyword arguments must be \('scale', 'offset'\)"):
        loaded(torch.ones(2))


def test_copies_share_graphs_and_no_tensors():
    import copy
    import pickle

    loaded = loaded_again(foregrad.export(torch.nn.Linear(3, 2), (torch.ones(4, 3),)))
    x = torch.randn(4, 3)
    expected = loaded(x)
    other = copy.deepcopy(loaded)
    with torch.no_grad():
        other.weight.zero_()
    assert torch.equal(loaded(x), expected)
    assert not torch.equal(other(x), expected)
    assert other.artifact is loaded.artifact
    with pytest.raises(TypeError, match=r"save it by `artifact.save"):
        pickle.dumps(loaded)


@pytest.mark.parametrize("backend", ["eager", "interpreter", "aot_eager"])
def test_other_backends(backend):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.GELU(), torch.nn.Linear(4, 2))
    loaded = loaded_again(foregrad.export(module, (torch.ones(4, 3),)))
    if backend == "aot_eager":
        backend = "torch:aot_eager"
    compiled = foregrad.compile(loaded, backend=backend, partition="min_cut")
    assert compiled.get_parameter("0.weight") is loaded.get_parameter("0.weight")
    x = torch.randn(4, 3)
    compiled(x).sum().backward()
    module(x).sum().backward()
    for a, b in zip(compiled.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_a_program_of_torch_export_gets_a_backward():
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    x = torch.randn(6, 3)
    dynamic = ({0: torch.export.Dim("batch", min=2, max=64)},)
    program = torch.export.export(module, (x,), dynamic_shapes=dynamic)
    loaded = loaded_again(foregrad.export(program, (x,), dynamic_shapes=({0: (2, 64)},)))
    assert set(loaded.state_dict()) == set(module.state_dict())
    x = torch.randn(9, 3)
    for model in (module, loaded):
        model(x).square().sum().backward()
    for (name, a), b in zip(
        module.named_parameters(), map(loaded.get_parameter, dict(module.named_parameters())), strict=True
    ):
        torch.testing.assert_close(a.grad, b.grad, msg=name)
