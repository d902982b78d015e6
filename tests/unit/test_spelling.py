"""Names and keys in generated Python, one by one: see tests/guards/test_hostile_names.py for whole programs."""

from __future__ import annotations

import collections
import keyword
import math

import pytest
import torch
from torch import fx

import foregrad
from foregrad.backends import eager
from foregrad.graph.printing import print_graph
from foregrad.graph.source import (
    Names,
    attribute,
    call_keywords,
    compile_source,
    item,
    key_text,
    key_texts,
    literal,
    shown,
)
from tests.guards.hostile_names import KEYS, NAMES, canary_is_alive


class Binder(dict):
    def __call__(self, wanted, value):
        name = f"{wanted}_{len(self)}"
        self[name] = value
        return name


def evaluated(text, bind, **variables):
    return eval(compile(text, "<test>", "eval"), {**bind, **variables})


class Anything:
    def __getattr__(self, name):
        return ("attribute", name)

    def __getitem__(self, key):
        return ("item", key)

    def __call__(*_, **keywords):
        return ("call", *keywords)


def test_every_name_reads_that_very_attribute():
    for name in NAMES:
        bind = Binder()
        if not (name.startswith("__") and name.endswith("__")):
            found = evaluated(attribute("x", name, bind), bind, x=Anything())
            assert found == ("attribute", name), ascii(name[:80])
        bind = Binder()
        assert evaluated(item("x", name, bind), bind, x=Anything()) == ("item", name)
        (text,) = call_keywords([(name, "1")], bind)
        assert evaluated(f"x({text})", bind, x=Anything()) == ("call", name)
    assert canary_is_alive()


def test_every_key_reads_that_very_item():
    for key in KEYS:
        bind = Binder()
        _, found = evaluated(item("x", key, bind), bind, x=Anything())
        assert found is key or (type(found) is type(key) and found == key)


def test_ordinary_names_and_keys_are_written_out():
    bind = Binder()
    assert attribute("x", "weight", bind) == "x.weight"
    assert item("x", "layers.0.weight", bind) == "x['layers.0.weight']"
    assert item("x", 3, bind) == "x[3]"
    assert call_keywords([("dim", "1")], bind) == ["dim=1"]
    assert not bind


def test_a_literal_is_the_value_with_its_type():
    for key in [*KEYS, *NAMES]:
        text = literal(key)
        if text is not None:
            found = eval(text)
            assert type(found) is type(key)
            assert found == key
            assert text.isascii()


def test_names_of_variables_are_plain_identifiers_that_differ():
    names = Names()
    found = [names.fresh(name) for name in NAMES]
    assert len(set(found)) == len(found)
    for name in found:
        assert name.isascii()
        assert name.isidentifier()
        assert not keyword.iskeyword(name)
        assert not (name.startswith("__") and name.endswith("__")), "it would be read by Python itself"


def test_text_for_people_is_one_printable_line():
    for name in NAMES:
        assert shown(name).isprintable()
        assert len(shown(name)) <= 160
        assert key_text(name).isprintable()
        compile_source(f"def f():  # {shown(name)}\n    return 1  # {shown(name)}\n", "f", {}, label=name)
    assert shown("größe") == "größe"
    assert shown("a\nb") == "a\\nb"


def test_texts_of_keys_differ_and_run_no_repr():
    keys = [key for key in KEYS if not (isinstance(key, float) and math.isnan(key))]
    texts = key_texts([*keys, *NAMES])
    assert len(set(texts)) == len(texts)
    assert canary_is_alive()


def run(text, name="forward"):
    namespace = {}
    exec(text, namespace)
    return namespace[name]


def test_printed_graphs_run_whatever_is_called_in_them():
    """Attributes of the module, methods, keyword arguments, and the header."""
    texts = [n for n in NAMES if n and "." not in n and not n.startswith("__") and not hasattr(fx.GraphModule, n)]
    root = torch.nn.Module()
    graph = fx.Graph()
    total = graph.placeholder("x")
    for number, name in enumerate(texts):
        if name in dir(root):
            continue
        root.register_buffer(name, torch.tensor(float(number)))
        node = fx.Node(graph, f"value_{number}", "get_attr", name, (), {})
        graph._insert(node)
        total = graph.call_function(torch.add, (total, node))
    graph.output(total)
    module = fx.GraphModule(root, fx.Graph())
    for name, value in root._buffers.items():
        module._buffers[name] = value
    for name in texts[:5]:
        text = print_graph(graph, header=f"graph of {name}", slots={"x": name, total.name: name})
        assert torch.equal(run(text)(module, torch.zeros(())), sum(root._buffers.values()))
    assert canary_is_alive()


def test_operators_called_as_keywords_of_python_are_printed_so_that_they_run():
    """`random_(1, 10)` calls the overload `from`, whose parameters are `from` and `to`."""
    text = str(foregrad.capture(lambda x: x.clone().random_(1, 10) * 2 + x, torch.ones(3, requires_grad=True)))
    assert "'from'" in text
    torch.manual_seed(0)
    out = run(text, "joint")(torch.ones(3), torch.ones(3))[0]
    torch.manual_seed(0)
    assert torch.equal(out, torch.ones(3).random_(1, 10) * 2 + 1)


def test_a_method_that_is_no_identifier_is_called_by_its_name():
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_method("add", (x, 1))
    graph.output(node)
    module = fx.GraphModule(torch.nn.Module(), graph)
    node.target = "x or __import__('os')"
    with pytest.raises(AttributeError, match="__import__"):
        eager.eager_compiler(module)([torch.ones(2)])


@pytest.mark.parametrize("key", [1, True, 1.0, -0.0, 0.0, 0, False], ids=repr)
def test_keys_that_are_equal_and_differ_in_type_are_other_calls(key):
    """`{1: x}`, `{True: x}` and `{1.0: x}` are one dict to `==`."""
    compiled = foregrad.compile(lambda d: {k: v * 2 for k, v in d.items()}, backend="eager")
    for kind in (dict, collections.OrderedDict, lambda pairs: collections.defaultdict(int, pairs)):
        for first in (1, True, 1.0, -0.0, 0.0, 0, False):
            compiled(kind([(first, torch.ones(2))]))
        (found,) = compiled(kind([(key, torch.ones(2))]))
        assert (type(found), str(found)) == (type(key), str(key))


def test_the_order_of_keywords_matters_where_a_function_can_see_it():
    compiled = foregrad.compile(lambda **kw: next(iter(kw.values())) * 2, backend="eager")
    a, b = torch.ones(2), torch.zeros(2)
    assert torch.equal(compiled(a=a, b=b), a * 2)
    assert torch.equal(compiled(b=b, a=a), b * 2)
    named = foregrad.compile(lambda a, b: a * 2 + b, backend="eager")
    assert torch.equal(named(a=a, b=b), named(b=b, a=a))
    assert len(named.foregrad.specializations) == 1


def test_attributes_asked_for_by_odd_texts_are_guarded():
    class Thing:
        pass

    thing, x = Thing(), torch.ones(2)
    setattr(thing, "odd {} name", 2.0)
    compiled = foregrad.compile(
        lambda x: x * getattr(thing, "odd {} name") * getattr(thing, "not there", 1.0) * getattr(x, "{0}\n", 1.0),
        backend="eager",
    )
    assert compiled(x)[0] == 2.0
    setattr(thing, "odd {} name", 3.0)
    assert compiled(x)[0] == 3.0
    setattr(thing, "not there", 5.0)
    assert compiled(x)[0] == 15.0
    setattr(x, "{0}\n", 7.0)
    assert compiled(x)[0] == 105.0
    setattr(x, "{0}\n", 9.0)
    assert compiled(x)[0] == 135.0


def test_attributes_of_tensors_whose_names_are_made_up_are_guarded():
    x, names = torch.ones(2), ["a b", "c"]
    compiled = foregrad.compile(lambda x: x * sum(getattr(x, n, 2.0) for n in names), backend="eager")
    setattr(x, "a b", 3.0)
    assert compiled(x)[0] == 5.0
    setattr(x, "a b", 4.0)
    assert compiled(x)[0] == 6.0


@pytest.mark.parametrize(
    ("first", "second"),
    [(range(0), range(1, 1)), (range(1, 2, 1), range(1, 2, 5)), (0j, -0j), (slice(1, 2), slice(True, 2))],
    ids=str,
)
def test_values_that_are_equal_and_can_be_told_apart_are_other_calls(first, second):
    compiled = foregrad.compile(lambda x, v: (x * 2, v), backend="eager")
    for value in (first, second):
        assert repr(compiled(torch.ones(2), value)[1]) == repr(value)


def test_a_complex_nan_is_itself():
    compiled = foregrad.compile(lambda x, v: x * 2, backend="eager")
    for _ in range(3):
        compiled(torch.ones(2), complex("nan"))
    assert len(compiled.foregrad.specializations) == 1


def test_an_attribute_that_fake_tensors_have_too_is_the_users():
    compiled = foregrad.compile(lambda x: x * x.constant, backend="eager")
    for value in (3.0, 4.0):
        x = torch.ones(2)
        x.constant = value
        assert torch.equal(compiled(x), x * value)
