"""Objects as arguments and results are eager's: their attributes, what is shared, what the call writes to them."""

import types

import pytest
import torch

import foregrad
from foregrad.errors import ForegradWarning
from tests.python import object_programs as programs


@pytest.mark.parametrize("name", programs.CAPTURED)
def test_as_in_eager(name):
    expected, found, eager, graphs = programs.check(programs.CAPTURED[name], name)
    assert expected == found
    assert eager == 0
    assert graphs <= 5


@pytest.mark.parametrize("name", programs.EAGER)
def test_what_only_c_code_sees_runs_eagerly(name):
    with pytest.warns(ForegradWarning):
        expected, found, eager, _ = programs.check(programs.EAGER[name], name)
    assert expected == found
    assert eager == 7


@pytest.mark.parametrize("name", programs.SOMETIMES)
@pytest.mark.filterwarnings("ignore")
def test_what_runs_eagerly_now_and_then(name):
    expected, found, eager, _ = programs.check(programs.SOMETIMES[name], name)
    assert expected == found
    assert 0 < eager < 7


def test_a_table_by_type_of_another_module_is_filled_under_the_type_that_eager_sees():
    library = types.ModuleType("tables_by_type")
    text = "table = {}\ndef rank(x):\n    if type(x) not in table: table[type(x)] = 'backend'\n    return len(x.shape)"
    exec(text, vars(library))
    modules = {"tables_by_type": library}
    call = foregrad.compile(lambda x: x * modules["tables_by_type"].rank(x), backend="eager", on_unsupported="eager")
    for _ in range(3):
        assert torch.equal(call(torch.ones(2)), torch.ones(2))
    assert library.table == {torch.Tensor: "backend"}
    assert foregrad.explain_recompiles(call).eager_calls == 0
    assert len(foregrad.explain_recompiles(call)) == 1


def test_what_garbage_collection_hides_is_not_taken_for_old():
    import gc

    class Out:
        pass

    def step(x):
        out = Out()
        out.x = x * 2
        gc.collect()
        return out

    call = foregrad.compile(step, backend="eager", on_unsupported="eager")
    with pytest.warns(ForegradWarning, match="no telling whether it makes it"):
        first = call(torch.ones(2))
    assert first.x.tolist() == [2.0, 2.0]
    assert call(torch.zeros(2)) is not first


def test_capture_takes_objects_apart():
    joint = foregrad.capture(lambda o: o.x * 2, types.SimpleNamespace(x=torch.ones(2)))
    assert [info.slot.path for info in joint.signature.inputs] == ["args[0].x"]


class Registered:
    """A container that PyTorch's trees know, over a dict that may grow."""

    def __init__(self, items):
        self._items = items

    def __getitem__(self, key):
        return self._items[key]

    def __setitem__(self, key, value):
        self._items[key] = value


def test_a_registered_container_that_grows_is_left_to_eager():
    import torch.utils._pytree as trees

    trees.register_pytree_node(
        Registered,
        lambda box: (list(box._items.values()), list(box._items)),
        lambda v, k: Registered(dict(zip(k, v, strict=True))),
    )

    def step(box):
        box["y"] = box["x"] * 2
        return box["y"].sum()

    call = foregrad.compile(step, backend="eager", on_unsupported="eager")
    with pytest.warns(ForegradWarning, match=r"changed args\[0\]"):
        for _ in range(2):
            box = Registered({"x": torch.ones(2)})
            assert call(box).item() == 4.0
            assert box["y"].tolist() == [2.0, 2.0]
    assert foregrad.explain_recompiles(call).eager_calls == 2
