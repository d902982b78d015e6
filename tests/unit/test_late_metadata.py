"""What graphs for other compilers say of their nodes, and their code, is made when somebody looks."""

import copy
import pickle

import pytest
import torch
from torch import fx, nn

import foregrad
from foregrad._torch.graphs import make_graph_module, strided_metadata, tensor_metadata
from foregrad.backends import eager

LAYOUTS = {
    "scalar": torch.ones(()),
    "contiguous": torch.ones(2, 3, 4),
    "transposed": torch.ones(2, 3).t(),
    "expanded": torch.ones(3, 1).expand(3, 4),
    "empty": torch.ones(0, 3).t(),
    "empty, four dimensions": torch.ones(2, 0, 3, 4).to(memory_format=torch.channels_last),
    "one element": torch.ones(2, 3)[:1, 1:2],
    "slice": torch.ones(4, 6)[:, ::2],
    "channels last": torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "channels last, one channel": torch.ones(2, 1, 4, 5).to(memory_format=torch.channels_last),
    "channels last, one pixel": torch.ones(2, 3, 1, 1).to(memory_format=torch.channels_last),
    "channels last, a slice": torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)[:, :2],
    "channels last 3d": torch.ones(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
    "half": torch.ones(3, dtype=torch.float16),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_metadata_from_numbers_is_that_of_the_tensor(layout):
    tensor = LAYOUTS[layout]
    assert strided_metadata(tuple(tensor.shape), tensor.stride(), tensor.dtype) == tensor_metadata(tensor)
    assert type(strided_metadata(tuple(tensor.shape), tensor.stride(), tensor.dtype).shape) is torch.Size


def compiled_by(compiler):
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    compiled = foregrad.aot_function(lambda x: module(x), compiler)
    x = torch.ones(2, 4, requires_grad=True)
    compiled(x).sum().backward()
    return module, x


def test_a_compiler_that_looks_at_no_metadata_makes_none():
    seen = []

    def compiler(gm, inputs):
        seen.append(gm)
        return gm

    module, x = compiled_by(compiler)
    expected = torch.autograd.grad(module(x).sum(), x)[0]
    assert torch.equal(x.grad, expected)
    for gm in seen:
        assert "_code" not in vars(gm)
        inner = [node for node in gm.graph.nodes if node.op == "call_function"]
        assert inner
        for node in inner:
            assert not {"val", "tensor_meta"} & set(dict.keys(node.meta))
            assert "tensor_meta" in node.meta
            assert dict(node.meta)["tensor_meta"] == tensor_metadata(node.meta["val"])


def test_eager_kernels_need_no_fake_values(monkeypatch):
    seen, render_graph = [], eager.render_graph

    def watched(gm, *args, **kwargs):
        inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
        saved = [node for node in inputs if not node.name.startswith(("primals", "tangents"))]
        seen.append([dict.__contains__(node.meta, "val") for node in saved])
        return render_graph(gm, *args, **kwargs)

    monkeypatch.setattr(eager, "render_graph", watched)
    foregrad.compile(lambda x: (x.tanh().exp() * 2).sum(), backend="eager")(
        torch.ones(3, requires_grad=True)
    ).backward()
    assert seen == [[], [False, False]]


def test_metadata_of_a_value_that_a_compiler_replaced_is_what_it_was():
    def compiler(gm, inputs):
        for node in gm.graph.nodes:
            if node.op == "call_function":
                node.meta["val"] = None
                assert node.meta["tensor_meta"].dtype is torch.float32
        return gm

    compiled_by(compiler)


def graph_module():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.sin, (x,)),))
    return make_graph_module(nn.Module(), graph, "Sine")


LOOKS = {
    "call": lambda gm: gm(torch.ones(2))[0],
    "forward": lambda gm: gm.forward(torch.ones(2))[0],
    "forward of the class": lambda gm: type(gm).forward(gm, torch.ones(2))[0],
    "script": lambda gm: torch.jit.script(gm)(torch.ones(2))[0],
    "pickle": lambda gm: pickle.loads(pickle.dumps(gm))(torch.ones(2))[0],
    "deepcopy": lambda gm: copy.deepcopy(gm)(torch.ones(2))[0],
    "copy": lambda gm: copy.copy(gm)(torch.ones(2))[0],
    "interpreter": lambda gm: fx.Interpreter(gm).run(torch.ones(2))[0],
    "retrace": lambda gm: fx.symbolic_trace(gm)(torch.ones(2))[0],
}


@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore:The TorchScript type system")
@pytest.mark.parametrize("look", LOOKS)
def test_code_is_there_for_whoever_looks(look):
    gm = graph_module()
    assert "forward" not in vars(type(gm))
    assert torch.equal(LOOKS[look](gm), torch.ones(2).sin())
    assert torch.equal(LOOKS[look](gm), torch.ones(2).sin())


def test_the_code_is_that_of_the_graph_when_it_is_made():
    gm = graph_module()
    for node in gm.graph.nodes:
        if node.op == "call_function":
            node.target = torch.cos
    gm.recompile()
    assert "forward" not in vars(type(gm))
    assert "torch.cos" in gm.code
    assert "torch.cos" in str(gm)
    for node in gm.graph.nodes:
        if node.op == "call_function":
            node.target = torch.tanh
    gm.recompile()
    assert "torch.tanh" in gm.code
    assert torch.equal(gm(torch.ones(2))[0], torch.ones(2).tanh())
