"""Inductor's passes over a joint graph cost less, and do what they did: only patterns that may match are tried, and
fake values of equal operators are made once.
"""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from torch import nn

import foregrad
from foregrad.inductor._torch import inductor as door
from foregrad.inductor._torch.inductor import possible_patterns
from foregrad.inductor.backend import InductorCompiler
from foregrad.inductor.repeats import layout_key

pytestmark = [
    pytest.mark.skipif(not door.cpp_compiler_found(), reason="Inductor needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def attention(q, k, v):
    """An attention that Inductor knows, written out."""
    scores = q @ k.transpose(-2, -1) / 4.0
    return scores.softmax(-1) @ v


def gelu(x, weight, *_):
    return nn.functional.gelu(nn.functional.layer_norm(x @ weight * 1.0, (16,))).float()


def operands():
    return [torch.randn(2, 4, 16, 16, requires_grad=True) for _ in range(3)]


def targets(gm):
    return [str(node.target) for node in gm.graph.nodes]


@pytest.mark.parametrize("function", [attention, gelu])
@pytest.mark.parametrize("grad", [True, False])
def test_the_passes_make_the_graph_that_they_make_with_all_patterns(monkeypatch, function, grad):
    x = operands()
    with torch.set_grad_enabled(grad):
        joint = foregrad.capture(function, *x)
    narrowed = InductorCompiler().prepare_joint(joint.module)
    monkeypatch.setattr(door, "possible_patterns", contextlib.nullcontext)
    whole = InductorCompiler().prepare_joint(joint.module)
    assert targets(narrowed) == targets(whole)
    assert targets(narrowed) != targets(joint.module)


def test_an_attention_is_found_and_its_patterns_are_not_tried_on_other_graphs(monkeypatch):
    from torch._inductor.pattern_matcher import CallFunction, MultiOutputPattern

    tried = []
    for kind in (CallFunction, MultiOutputPattern):
        original = kind.match
        monkeypatch.setattr(kind, "match", lambda self, node, f=original: tried.append(self) or f(self, node))
    found = {}
    for function in (attention, gelu):
        tried.clear()
        joint = foregrad.capture(function, *operands())
        prepared = InductorCompiler().prepare_joint(joint.module)
        found[function] = (len(tried), any("scaled_dot_product" in name for name in targets(prepared)))
    assert found[attention][1]
    assert not found[gelu][1]
    assert found[gelu][0] < len(joint.graph.nodes)


def test_another_thread_tries_all_patterns_meanwhile():
    from torch._inductor.pattern_matcher import CallFunction, KeywordArg, PatternMatcherPass, register_graph_pattern

    asked = []
    one_pass = PatternMatcherPass()

    class Asked(CallFunction):
        def match(self, node):
            asked.append(threading.current_thread())
            return super().match(node)

    pattern = Asked(torch.sin, CallFunction(torch.cos, KeywordArg("x")))
    register_graph_pattern(pattern, pass_dict=one_pass)(lambda match, x: None)
    gm = torch.fx.symbolic_trace(lambda x: torch.sin(x))
    with possible_patterns():
        one_pass.apply(gm)
        assert not asked
        other = threading.Thread(target=one_pass.apply, args=(gm,))
        other.start()
        other.join()
        assert asked == [other]
    one_pass.apply(gm)
    assert len(asked) == 2


def views(x, y):
    """Equal views of different tensors, at different distances in their memory."""
    out = []
    for z in (x, y, x * 2, (x * 3)[1:], (x * 4)[2:]):
        rows = z[:3].view(3, 2, 2).transpose(0, 1)
        out += [rows[1], rows.reshape(2, 6), rows + 1, *rows[:, 1:].split(1, 1), torch.view_as_complex(rows).conj()]
    return tuple(out)


def test_values_made_once_have_the_layouts_and_the_memory_that_each_would_have():
    joint = foregrad.capture(views, torch.randn(5, 4), torch.randn(5, 4))
    inputs = [node.meta["val"] for node in joint.placeholders()]

    def found(**how):
        door.propagate(joint.module, inputs, joint.fake_mode, **how)
        places = {}
        layouts = []
        for node in joint.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                memory = places.setdefault(value.untyped_storage()._cdata, len(places))
                layout = value.shape, value.stride(), value.storage_offset(), value.dtype, value.is_conj()
                layouts.append((memory, *layout))
        return layouts

    assert found(key_of=layout_key) == found()
    assert len({layout[0] for layout in found()}) < len(found())
