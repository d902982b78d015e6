"""Numbers read from tensors are given to operators on tensors of one device, on that device."""

import pytest
import torch
from torch import fx

from foregrad._torch.fakes import FakeTensorMode
from foregrad.inductor.numbers import as_vector, numbers_in_a_tensor

aten = torch.ops.aten


@pytest.mark.parametrize("others", [["cuda"], ["cuda", "cpu"], ["cpu", "cuda"]], ids=", ".join)
def test_a_list_over_two_devices_keeps_its_numbers(others):
    mode, graph = FakeTensorMode(), fx.Graph()
    devices = ["cpu", *others] if len(others) == 1 else others

    def node(op, *args, val):
        made = graph.placeholder(op) if isinstance(op, str) else graph.call_function(op, args)
        made.meta["val"] = val
        return made

    with mode:
        step = node("step", val=torch.ones(()))
        tensors = [node(f"t{i}", val=torch.ones(3, device=device)) for i, device in enumerate(devices)]
        number = node(aten._local_scalar_dense.default, step, val=1.0)
        values = [tensor.meta["val"] for tensor in tensors]
        scaled = node(aten._foreach_mul.ScalarList, tensors, [number] * len(tensors), val=values)
        alone = node(aten.mul.Tensor, tensors[0], number, val=values[0])
        graph.output((scaled, alone))
    gm = fx.GraphModule(torch.nn.Module(), graph)
    numbers_in_a_tensor(gm, [number], mode)
    targets = [node.target for node in gm.graph.nodes]
    assert aten._foreach_mul.ScalarList in targets
    (vector,) = [node for node in gm.graph.nodes if node.target is as_vector]
    assert vector.args[1] == torch.device(devices[0], 0 if devices[0] == "cuda" else None)
