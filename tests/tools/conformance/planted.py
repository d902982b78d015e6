"""Compilers and partitions with one fault each, for the suite to find."""

from __future__ import annotations

import ctypes
import os
import time

import torch
from torch import fx

import foregrad

aten = torch.ops.aten
KEPT = []


def right(gm, inputs):
    return foregrad.make_boxed_func(gm.forward)


def _has(gm, op):
    return any(node.target is op for node in gm.graph.nodes)


def gelu_by_tanh(gm, inputs):
    for node in gm.graph.nodes:
        if node.target is aten.gelu.default:
            node.kwargs = {**node.kwargs, "approximate": "tanh"}
    gm.recompile()
    return gm


def drops_none_gradients(gm, inputs):
    def run(*values):
        return [value for value in gm.forward(*values) if value is not None]

    return run


def keeps_its_arguments(gm, inputs):
    def run(*values):
        KEPT.append(values)
        return gm.forward(*values)

    return run


def overwrites_its_arguments(gm, inputs):
    """Uses the memory of its first argument for its own, where no version counter sees it."""

    def run(*values):
        results = gm.forward(*values)
        x = values[0] if values else None
        if isinstance(x, torch.Tensor) and x.dtype is torch.float32 and x.is_contiguous() and x.numel():
            ctypes.memset(x.data_ptr(), 0, 4 * x.numel())
        return results

    return run


def uses_its_memory_again(gm, inputs):
    kept = {}

    def run(*values):
        results = list(gm.forward(*values))
        for i, result in enumerate(results):
            if isinstance(result, torch.Tensor) and result.dtype is torch.float32 and result.layout is torch.strided:
                own = kept.setdefault((i, result.shape, result.stride()), torch.empty_like(result))
                results[i] = own.copy_(result)
        return results

    return run


def mistakes_a_size_for_a_constant(gm, inputs):
    first = {}

    def run(*values):
        """Draws once, and gives what the first call gave for it."""
        if not values or not isinstance(values[0], torch.Tensor):
            return gm.forward(*values)
        return first.setdefault(values[0].shape, gm.forward(*values))

    return run


def seeds_by_itself(gm, inputs):
    def run(*values):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            return gm.forward(*values)

    return run


def refuses_softmax(gm, inputs):
    if _has(gm, aten._softmax.default):
        raise NotImplementedError("no kernel for aten._softmax")
    return gm


def refuses_constants(gm, inputs):
    if any(node.op == "get_attr" for node in gm.graph.nodes):
        raise NotImplementedError("no constants")
    return gm


def raises_when_called(gm, inputs):
    def run(*values):
        if _has(gm, aten.cumsum.default):
            raise RuntimeError("the kernel of cumsum failed")
        return gm.forward(*values)

    return run


def ends_the_process(gm, inputs):
    def run(*values):
        if _has(gm, aten.cumsum.default):
            ctypes.string_at(0)
        return gm.forward(*values)

    return run


def stands_still(gm, inputs):
    if _has(gm, aten.cumsum.default):
        time.sleep(600)
    return gm


def exits_while_it_compiles(gm, inputs):
    if _has(gm, aten.cumsum.default):
        os._exit(3)
    return gm


def partition_that_is_right(joint, inputs, *, num_fwd_outputs, **more):
    return foregrad.default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **more)


def partition_that_loses_a_sine(joint, inputs, *, num_fwd_outputs, **more):
    graph = fx.Graph()
    graph.output(graph.graph_copy(joint.graph, {}))
    for node in graph.nodes:
        if node.target is aten.cos.default:
            node.target = aten.sin.default
    return foregrad.default_partition(fx.GraphModule(joint, graph), inputs, num_fwd_outputs=num_fwd_outputs, **more)


def partition_that_refuses(joint, inputs, *, num_fwd_outputs, **more):
    raise NotImplementedError("no split for this graph")
