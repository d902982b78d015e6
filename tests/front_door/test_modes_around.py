"""Under a dispatch mode of the program's, a compiled function is the original function."""

import torch
from torch.utils.flop_counter import FlopCounterMode

import foregrad


def test_a_mode_around_a_call_sees_the_operators_of_the_program():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    compiled, x = foregrad.compile(model, backend="eager"), torch.ones(3, 4)
    flops = []
    for call in (model, compiled, compiled):
        with FlopCounterMode(display=False) as counter:
            call(x).sum().backward()
        flops.append(counter.get_total_flops())
        compiled(x)  # and with a graph made, likewise
    assert flops[0] > 0 and flops == [flops[0]] * 3
    assert len(foregrad.explain_recompiles(compiled)) == 1
