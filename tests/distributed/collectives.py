"""Collectives in the printed graphs of a block, and how often a step runs each, whatever it recomputes.

Never more often than eager, and the default partition as often; others make one of equal ones.
"""

import re
import sys
from collections import Counter

import torch

import foregrad

from . import programs
from .ranks import joined
from .traffic import traffic
from .transformer import LENGTH, WIDTH, Transformer


def blocks(parallel):
    torch.manual_seed(0)
    return programs.PARALLEL[parallel](Transformer()).blocks


def exchanged(call, shape):
    x = torch.ones(shape).requires_grad_()
    return traffic(lambda: call(x).sum().backward())


def in_graphs(*modules):
    """How many collectives of each kind graphs hold."""
    names = [str(node.target) for module in modules for node in module.graph.nodes if node.op == "call_function"]
    found = [re.fullmatch(r"_c10d_functional\.(\w+)\.default", name) for name in names]
    return Counter(match[1] for match in found if match is not None)


def main(rank, size, store):
    with joined(rank, size, store):
        part = LENGTH // size
        for parallel, shape in (("tensor", (2, LENGTH, WIDTH)), ("sequence", (2, part, WIDTH))):
            expected, most = exchanged(blocks(parallel)[0], shape)
            joint = foregrad.capture(blocks(parallel)[0], torch.ones(shape).requires_grad_())
            kinds = in_graphs(joint.module)
            assert kinds.pop("wait_tensor") == sum(kinds.values()) > 0
            assert all(f"_c10d_functional.{kind}" in str(joint) for kind in kinds)
            assert kinds.keys() == (
                {"all_reduce"} if parallel == "tensor" else {"all_gather_into_tensor", "reduce_scatter_tensor"}
            )
            for policy in ("default", "min_cut", "fused"):
                parts = foregrad.partition(joint, policy)
                halves, whole = in_graphs(parts.forward, parts.backward), in_graphs(joint.module)
                assert halves == whole if policy == "default" or parallel == "tensor" else halves <= whole, halves
            for budget in (None, 0.0, 0.5):
                block = blocks(parallel)[0]
                call = foregrad.compile(block, backend="eager", memory_budget=budget, on_unsupported="raise")
                exchanged(call, shape)  # the first call compiles
                found, sizes = exchanged(call, shape)
                assert len(call.foregrad.specializations) == 1, "a graph ran"
                is_same = found == expected and sizes == most
                is_less = found <= expected and sizes <= most
                assert is_same if budget is None or parallel == "tensor" else is_less, (found, expected)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
