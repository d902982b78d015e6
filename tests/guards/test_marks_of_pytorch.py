"""Attributes that PyTorch hangs onto tensors by itself are no state of the program: they are neither guarded nor lost."""

import pytest
import torch

import foregrad

MARKS = {
    "dynamic": torch._dynamo.maybe_mark_dynamic,
    "static": torch._dynamo.mark_static,
    "unbacked": torch._dynamo.decorators.mark_unbacked,
}


def attribute_by_a_made_up_name(x, part):
    return x * getattr(x, "sc" + part, 2.0)


@pytest.mark.parametrize("mark", MARKS.values(), ids=MARKS)
@pytest.mark.parametrize("marked", [0, 1])
def test_marks_are_not_guarded(mark, marked):
    compiled = foregrad.compile(attribute_by_a_made_up_name, backend="eager", on_unsupported="raise")
    for number in range(3):
        x = torch.ones(2, 3)
        if number == marked:
            mark(x, 0)
        assert torch.equal(compiled(x, "ale"), x * 2)
    assert len(foregrad.explain_recompiles(compiled)) == 1


def test_an_attribute_beside_a_mark_is_guarded():
    compiled = foregrad.compile(attribute_by_a_made_up_name, backend="eager", on_unsupported="raise")
    for scale in (None, 3.0, 4.0):
        x = torch.ones(2, 3)
        torch._dynamo.maybe_mark_dynamic(x, 0)
        if scale is not None:
            x.scale = scale
        assert torch.equal(compiled(x, "ale"), x * (2.0 if scale is None else scale))


def test_marks_made_in_a_run_stay():
    """A capture puts the attributes of tensors back as they were, but for these."""
    weight = torch.ones(3)

    def step(x):
        torch._dynamo.maybe_mark_dynamic(weight, 0)
        return x * weight * getattr(weight, "sca" + "le", 1.0)

    foregrad.compile(step, backend="eager")(torch.ones(3))
    assert hasattr(weight, "_dynamo_weak_dynamic_indices")
