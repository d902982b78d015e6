"""A backend for an accelerator that does not exist: it fuses neighbouring elementwise operators into one kernel each.

Run with `python examples/toy_backend.py`. docs/backends.md goes through it. The accelerator computes tile by tile; a
kernel reads its inputs once, keeps what lies between its operators on the chip, and writes what others need.
"""

import torch

import foregrad

TILE = 256
launches = {"fused": 0, "library": 0}


def fits(node):
    """Whether a node can be part of a kernel: elementwise, and all that it reads and makes is laid out alike."""
    if node.op != "call_function" or torch.Tag.pointwise not in getattr(node.target, "tags", ()):
        return False
    values = [n.meta["val"] for n in (node, *node.all_input_nodes)]
    return all(v.shape == values[0].shape and v.is_contiguous() for v in values)


def kernels(graph):
    """The graph's calls in order, as lists: neighbours that fit each other together, all others alone."""
    groups = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        last = groups[-1][-1] if groups else None
        joins = last is not None and fits(node) and fits(last) and node.meta["val"].shape == last.meta["val"].shape
        groups[-1].append(node) if joins else groups.append([node])
    return groups


def launch(group, memory):
    """Run one kernel: `memory` holds the values of nodes, and gets those that others read."""

    def computed(node, values):
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
        return node.target(*args, **kwargs)

    if not fits(group[0]):
        launches["library"] += 1
        memory[group[0]] = computed(group[0], memory)
        return
    launches["fused"] += 1
    inside = set(group)
    read = {n for node in group for n in node.all_input_nodes} - inside
    written = [node for node in group if any(user not in inside for user in node.users)]
    memory |= {n: torch.empty(n.meta["val"].shape, dtype=n.meta["val"].dtype) for n in written}
    flat = {n: memory[n].view(-1) for n in (*read, *written)}
    for start in range(0, group[0].meta["val"].numel(), TILE):
        on_chip = {n: flat[n][start : start + TILE] for n in read}
        for node in group:
            on_chip[node] = computed(node, on_chip)
        for node in written:
            flat[node][start : start + TILE] = on_chip[node]


def toy_compiler(gm, example_inputs):
    """What foregrad calls with each half: an FX graph of ATen operators, and fake tensors. Returns a function."""
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    constants = {node: getattr(gm, node.target) for node in gm.graph.nodes if node.op == "get_attr"}
    output = next(node for node in gm.graph.nodes if node.op == "output")
    plan = kernels(gm.graph)

    def run(*args):
        memory = {**constants, **dict(zip(inputs, args, strict=True))}
        for group in plan:
            launch(group, memory)
        return torch.fx.map_arg(output.args[0], memory.__getitem__)

    return run


foregrad.register_backend("toy", toy_compiler, partition="min_cut", description="a toy accelerator", replace=True)

if __name__ == "__main__":
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.SiLU(), torch.nn.Linear(128, 8), torch.nn.Tanh())
    x = torch.randn(32, 64)
    results = []
    for run in (model, foregrad.compile(model, backend="toy")):
        model.zero_grad()
        loss = (run(x).sigmoid() * 3).square().mean()
        loss.backward()
        results.append([loss, *(parameter.grad.clone() for parameter in model.parameters())])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)
    print(f"loss {loss.item():.4f}, gradients as in eager; kernels: {launches}")
