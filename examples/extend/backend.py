"""A backend: a compiler for the halves of a joint graph. This one runs a graph node by node, and counts operators.

A compiler is `(graph module, example inputs) -> callable`. The example inputs are fake tensors: metadata, no memory.
The name works wherever a backend is named; the entry point `foregrad.backends` registers it for an installed package.
"""

import torch

import foregrad

COMPILED = []


def compile_graph(module, example_inputs):
    operators = [node for node in module.graph.nodes if node.op == "call_function"]
    COMPILED.append(len(operators))

    def run(*args):
        # An interpreter that stays would keep the values of its last call.
        return torch.fx.Interpreter(module).run(*args)

    return run


foregrad.register_backend("node-by-node", compile_graph, description="an interpreter in ten lines", replace=True)

if __name__ == "__main__":
    f = foregrad.compile(lambda x: x.sin() * 2, backend="node-by-node")
    x = torch.zeros(2, requires_grad=True)
    result = f(x)
    print(COMPILED)  # [2]
    result.sum().backward()
    print(COMPILED)  # [2, 3]
    print(x.grad)  # tensor([2., 2.])
    print("node-by-node" in foregrad.list_backends())  # True
