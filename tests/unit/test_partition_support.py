"""Joint graphs made by hand, running them, and running their halves: shared by the partitioners' tests, and tested."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from foregrad._torch.fakes import FakeTensorMode
from foregrad.partitioners.classify import Kind, classify

aten = torch.ops.aten


class Joint:
    """A joint graph under construction. Calling it adds an operator; fake values are computed on the way."""

    def __init__(self):
        self.graph = fx.Graph()
        self.mode = FakeTensorMode()
        self.root = torch.nn.Module()
        self.counts = {"primals": 0, "tangents": 0}
        self.count = 0

    def _input(self, kind, shape):
        self.counts[kind] += 1
        node = self.graph.placeholder(f"{kind}_{self.counts[kind]}")
        with self.mode:
            node.meta["val"] = torch.empty(shape)
        return node

    def primal(self, *shape):
        return self._input("primals", shape)

    def tangent(self, *shape):
        return self._input("tangents", shape)

    def constant(self, value):
        name = f"_constant{self.count}"
        self.count += 1
        self.root.register_buffer(name, value)
        node = self.graph.get_attr(name)
        node.meta["val"] = self.mode.from_tensor(value)
        return node

    def __call__(self, target, *args, meta=None, **kwargs):
        packet = getattr(target, "overloadpacket", target)
        node = self.graph.create_node("call_function", target, args, kwargs, packet.__name__)
        with self.mode:
            fake_args, fake_kwargs = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
            node.meta["val"] = target(*fake_args, **fake_kwargs)
        node.meta |= meta or {}
        return node

    def done(self, outputs, gradients):
        """(joint module, keywords for a partitioner)"""
        self.graph.output([*outputs, *gradients])
        return fx.GraphModule(self.root, self.graph), {"num_fwd_outputs": len(outputs)}


def placeholders(module):
    return [n for n in module.graph.nodes if n.op == "placeholder"]


def names(nodes):
    return [n.name if isinstance(n, fx.Node) else n for n in nodes]


def ops(module):
    """Names of the operators a graph runs, in order."""
    return [n.name for n in module.graph.nodes if n.op == "call_function"]


def outputs_of(module):
    return list(module.graph.output_node().args[0])


def saved_names(forward, num_fwd_outputs):
    return names(outputs_of(forward)[num_fwd_outputs:])


def interpret(module, values):
    # Not the module's own code: PyTorch's captures give it one that takes nested containers.
    return list(fx.Interpreter(module).run(*values, enable_io_processing=False))


def example_values(joint):
    """A real value for each placeholder, by name."""
    values = {}
    for node in placeholders(joint):
        fake = node.meta["val"]
        real = torch.randn(tuple(map(int, fake.shape)), dtype=torch.float64) if isinstance(fake, torch.Tensor) else None
        if real is None:
            values[node.name] = int(fake)
        elif fake.dtype.is_floating_point:
            values[node.name] = real.to(fake.dtype)
        else:
            values[node.name] = (real > 0).to(fake.dtype)  # an index into any table of two
    return values


def run_joint(joint, values, seed=0):
    torch.manual_seed(seed)
    return interpret(joint, [values[n.name] for n in placeholders(joint)])


def run_halves(forward, backward, values, num_fwd_outputs, seed=0):
    """Forward outputs and gradients, the backward fed by name from what the forward saved."""
    torch.manual_seed(seed)
    results = interpret(forward, [values[n.name] for n in placeholders(forward)])
    saved = outputs_of(forward)[num_fwd_outputs:]
    kept = {node.name: value for node, value in zip(saved, results[num_fwd_outputs:], strict=True)}
    assert len(kept) == len(saved), f"a value is saved twice: {names(saved)}"
    takes = placeholders(backward)
    arguments = [kept.pop(n.name) if n.name in kept else values[n.name] for n in takes]
    assert not kept, f"saved but not taken: {list(kept)}"
    return [*results[:num_fwd_outputs], *interpret(backward, arguments)]


def assert_same(wanted, got):
    """Equal to the last bit, None where None is."""
    for want, have in zip(wanted, got, strict=True):
        if isinstance(want, torch.Tensor):
            torch.testing.assert_close(have, want, rtol=0, atol=0, equal_nan=True)
        else:
            assert have == want


def assert_valid(joint, forward, backward, num_fwd_outputs):
    """The halves compute what the joint graph does, and keep the rules that every partition must keep."""
    values = example_values(joint)
    copies = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in values.items()}
    wanted = run_joint(joint, values)
    assert_same(wanted, run_halves(forward, backward, copies, num_fwd_outputs))
    for half in (forward, backward):
        half.graph.lint()
    primals = [n.name for n in placeholders(joint) if n.name.startswith("primals")]
    tangents = [n.name for n in placeholders(joint) if n.name.startswith("tangents")]
    assert names(placeholders(forward)) == primals
    takes = names(placeholders(backward))
    assert takes[len(takes) - len(tangents) :] == tangents
    saved = outputs_of(forward)[num_fwd_outputs:]
    tensors = [n.name for n in saved if isinstance(n.meta.get("val"), torch.Tensor)]
    numbers = [n.name for n in saved if not isinstance(n.meta.get("val"), torch.Tensor)]
    assert names(saved) == tensors + numbers, "numbers are saved last"
    assert takes == [*numbers, *tensors, *tangents], "the backward takes numbers, tensors, tangents"
    unused = [n.name for n in placeholders(backward) if not n.users and n.name in tensors]
    assert not unused, f"saved but not used: {unused}"
    assert once(forward) == [n for n in once(joint) if n not in once(backward)], "each runs once, in order"
    for half in (forward, backward):
        assert all("val" in n.meta for n in half.graph.nodes if n.op == "call_function" and classify(n).kind < 9)


def once(module):
    """Names of random operators and effects, in order."""
    kinds = (Kind.RANDOM, Kind.EFFECT)
    return [n.name for n in module.graph.nodes if n.op == "call_function" and classify(n).kind in kinds]


def small_joint():
    """y = sin(x @ w), with its gradients."""
    j = Joint()
    x, w, t = j.primal(3, 4), j.primal(4, 5), j.tangent(3, 5)
    mm = j(aten.mm.default, x, w)
    y = j(aten.sin.default, mm)
    cos = j(aten.cos.default, mm)
    g = j(aten.mul.Tensor, t, cos)
    wt = j(aten.t.default, w)
    xt = j(aten.t.default, x)
    return j.done([y], [j(aten.mm.default, g, wt), j(aten.mm.default, xt, g)])


def halves_by_hand(saved="mm", wrong=False):
    forward, backward = Joint(), Joint()
    x, w = forward.primal(3, 4), forward.primal(4, 5)
    mm = forward(aten.mm.default, x, w)
    y = forward(aten.sin.default, mm)
    forward.graph.output((y, x, w, mm))
    x, w = backward._input("primals", (3, 4)), backward._input("primals", (4, 5))
    mm = backward.graph.placeholder(saved)
    mm.meta["val"] = backward.mode.from_tensor(torch.empty(3, 5))
    t = backward.tangent(3, 5)
    cos = backward(aten.sin.default if wrong else aten.cos.default, mm)
    g = backward(aten.mul.Tensor, t, cos)
    wt = backward(aten.t.default, w)
    xt = backward(aten.t.default, x)
    backward.graph.output((backward(aten.mm.default, g, wt), backward(aten.mm.default, xt, g)))
    return fx.GraphModule(forward.root, forward.graph), fx.GraphModule(backward.root, backward.graph)


def test_a_right_split_passes():
    joint, _ = small_joint()
    assert_valid(joint, *halves_by_hand(), 1)


def test_a_wrong_value_is_noticed():
    joint, _ = small_joint()
    with pytest.raises(AssertionError, match=r"not equal|mismatch"):
        assert_valid(joint, *halves_by_hand(wrong=True), 1)


def test_a_saved_value_under_another_name_is_noticed():
    joint, _ = small_joint()
    with pytest.raises((AssertionError, KeyError), match="other"):
        assert_valid(joint, *halves_by_hand(saved="other"), 1)
