"""Where each node says it comes from: the user's line, and the modules inside the compiled one that were running."""

import torch

import foregrad


class TwoOnALine(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.ReLU()
        self.second = torch.nn.Sigmoid()

    def forward(self, x):
        return self.second(self.first(x)) + self.first(-x)


def by_op(joint):
    return {n.target: n.meta for n in joint.graph.nodes if n.op == "call_function"}


def test_modules_called_on_one_line_are_told_apart():
    module = TwoOnALine()
    joint = foregrad.capture(module, torch.randn(3, requires_grad=True))
    names = {
        str(op): [path for path, _ in meta["nn_module_stack"].values()]
        for op, meta in by_op(joint).items()
        if meta["partitioner_tag"] == "is_forward" and "nn_module_stack" in meta
    }
    assert names["aten.relu.default"][-1].endswith("first")
    assert names["aten.sigmoid.default"][-1].endswith("second")
    assert "aten.add.Tensor" not in names  # it is the outermost module's own


def test_a_backward_node_carries_the_line_and_module_of_its_forward():
    module = TwoOnALine()
    joint = foregrad.capture(module, torch.randn(3, requires_grad=True))
    meta = by_op(joint)[torch.ops.aten.sigmoid_backward.default]
    assert "self.second(self.first(x))" in meta["stack_trace"]
    assert [path for path, _ in meta["fwd_nn_module_stack"].values()][-1].endswith("second")


def turned(x):
    y = x.t()
    z = y * 2
    w = z[0]
    return w.sin().sum()


def test_a_view_carries_the_line_that_made_it_not_the_one_that_read_it():
    joint = foregrad.capture(turned, torch.randn(3, 3, requires_grad=True))
    lines = {n.name: n.meta["stack_trace"].splitlines()[-1].strip() for n in joint.graph.nodes if "seq_nr" in n.meta}
    assert lines["t"] == lines["t_1"] == "y = x.t()"
    assert lines["select"] == lines["select_backward"] == "w = z[0]"
    assert lines["mul"] == "z = y * 2"
    assert lines["expand"] == "return w.sin().sum()"
