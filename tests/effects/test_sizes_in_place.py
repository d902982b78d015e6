"""Sizes and memory that change in place, and views past edges: what is compiled, and what runs eagerly by name."""

from __future__ import annotations

import warnings

import pytest
import torch

import foregrad


def squeezed_result(x):
    return (x * 2).unsqueeze_(0).squeeze_().t_() + 1


def written_after(x):
    y = (x * 2).t_()
    y[0].mul_(3)
    return y, y.sum(0)


def detached_alias(x):
    y = x.detach().clone()
    z = y.detach()
    z.t_()
    return x * y * z.t()


def plain_mask(x):
    mask = torch.ones(3)
    mask.unsqueeze_(0)
    return x * mask


def window_within_edges(x):
    return (x * 2).as_strided((2, 2), (1, 1), 1) + 1


def read_past_the_edges_without_gradients(x):
    y = torch.arange(6.0)
    return x * y[2:4].as_strided((3,), (1,), 0)


def argument(x):
    y = x * 1
    return torch.Tensor.t_(y.view(3, 3))


def base_of_a_view(x):
    y = x * 2
    v = y[0]
    y.t_()
    return y, v


def gradients_that_come_later(x):
    y = torch.zeros(3, 3)
    v = y[0]
    y.t_()
    y.add_(x)
    return v * 2


def past_the_edges(x):
    return (x * 2)[1].as_strided((2, 3), (1, 1), 0) * 3


def written_past_the_edges(x):
    y = torch.zeros(6)
    y[2:4].as_strided((3,), (1,), 0).add_(1)
    return x * y[:3]


def part_of_an_expanded_tensor(x):
    y = torch.zeros(3).expand(2, 3)
    y[0] += 1
    return x[:2] * y


def rounded_through_data(x):
    y = x * 2
    y.data = y.data.round()
    return y * x


def exchanged_and_put_back(x):
    held = x.data
    x.data = held * 2
    y = torch.nn.functional.linear(x, x)
    x.data = held
    return y + x.detach()


def data_of_a_view(x):
    y = x * 2
    v = y[0]
    v.data = v.data.clone()
    return v * 2


def data_of_an_alias(x):
    v = x.detach()
    v.data = v.data.clone()
    return x * v


def view_of_what_was_there(x):
    y = x * 2
    v = y[0]
    y.data = y.data.clone()
    return y, v


def memory_by_set(x):
    y = torch.zeros(3)
    y.set_(torch.ones(3))
    return x * y


def run(function, wrap):
    x = torch.arange(9.0).view(3, 3).requires_grad_()
    outputs = wrap(function)(x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    (gradient,) = torch.autograd.grad(sum((o * o).sum() for o in outputs), x)
    return [*outputs, gradient]


def compiled(function):
    return foregrad.compile(function, backend="eager")


def through_dynamo(function):
    torch._dynamo.reset()
    return torch.compile(function, backend="foregrad", options={"backend": "eager"})


KEPT = [
    squeezed_result,
    written_after,
    detached_alias,
    plain_mask,
    window_within_edges,
    read_past_the_edges_without_gradients,
    rounded_through_data,
    exchanged_and_put_back,
]
REFUSED = {
    argument: "mutation",
    base_of_a_view: "mutation",
    gradients_that_come_later: "mutation",
    past_the_edges: "alias",
    written_past_the_edges: "alias",
    part_of_an_expanded_tensor: "alias",
    data_of_a_view: "mutation",
    data_of_an_alias: "mutation",
    view_of_what_was_there: "alias",
    memory_by_set: "mutation",
}
ERRORS = {"mutation": foregrad.errors.UnsupportedMutationError, "alias": foregrad.errors.UnsupportedAliasError}


# Dynamo looks at `.grad` of tensors that are no leaves.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("wrap", [compiled, through_dynamo])
@pytest.mark.parametrize("function", KEPT, ids=lambda f: f.__name__)
def test_a_result_that_nothing_is_a_view_of_changes_its_sizes_as_in_eager(function, wrap):
    torch.testing.assert_close(run(function, wrap), run(function, lambda f: f), rtol=0, atol=0)


@pytest.mark.parametrize("function", REFUSED, ids=lambda f: f.__name__)
def test_it_is_refused_with_the_line_and_runs_eagerly_with_one_warning(function):
    with pytest.raises(ERRORS[REFUSED[function]], match=r"test_sizes_in_place\.py:\d+ in"):
        run(function, compiled)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = run(function, lambda f: foregrad.compile(f, backend="eager", on_unsupported="eager"))
    assert [w for w in told if "test_sizes_in_place.py:" in str(w.message)]
    torch.testing.assert_close(found, run(function, lambda f: f), rtol=0, atol=0)
    with pytest.raises(foregrad.errors.UnsupportedError):
        foregrad.aot_function(function, fw_compiler=lambda gm, _: gm)(torch.ones(3, 3, requires_grad=True))


def _updated_as_one_vector(module, x):
    vector = torch.nn.utils.parameters_to_vector(module.parameters()).detach() * 0.5
    torch.nn.utils.vector_to_parameters(vector, module.parameters())
    return module(x)


def _old_view_written(module, x):
    view, vector = module.weight[1:], torch.ones(6)
    module.weight.data = vector[2:].view(2, 2)
    with torch.no_grad():
        view.mul_(2)
    return module(x).sum() + view.sum()


@pytest.mark.parametrize(("program", "is_compiled"), [(_updated_as_one_vector, True), (_old_view_written, False)])
def test_parameters_become_parts_of_one_memory(program, is_compiled):
    ours, eager = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    eager.load_state_dict(ours.state_dict())
    compiled = foregrad.compile(lambda x: program(ours, x), backend="eager", on_unsupported="eager")
    for i in range(3):
        x = torch.full((3, 2), float(i))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got, expected = compiled(x), program(eager, x)
        assert torch.equal(got, expected)
        got.sum().backward()
        expected.sum().backward()
        for one, other in zip(ours.parameters(), eager.parameters(), strict=True):
            assert torch.equal(one, other)
            assert torch.equal(one.grad, other.grad)
    assert (not compiled.foregrad.recompiles().eager) is is_compiled
