"""Plan the training of a model of 70 billion parameters that is not there, on a laptop.

    python examples/plan_70b.py [layers]

The model is on `meta`: it has no memory. One capture of its step, forward and backward, is cut in six ways. What fits a
rank of 64 is printed, and `plan.html` has it all.
"""

import sys

import torch
from torch import nn
from torch.nn import functional

import foregrad

WIDTH, HEADS, GROUPS, INNER, VOCABULARY, LENGTH = 8192, 64, 8, 28672, 128256, 4096


class Block(nn.Module):
    """Attention over grouped heads, and a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS * GROUPS
        self.q, self.k, self.v = (nn.Linear(WIDTH, n, bias=False) for n in (WIDTH, size, size))
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)
        self.before, self.between = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x)
        q, k, v = (layer(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(found.transpose(1, 2).flatten(2))
        y = self.between(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Language(nn.Module):
    """A language model with its loss."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), labels.flatten())


def main(layers: int = 80) -> None:
    with torch.device("meta"):
        model, tokens = Language(layers).to(torch.bfloat16), torch.zeros(1, LENGTH, dtype=torch.long)
    # Shards, their gradients and the optimizer's state in single precision; layers are gathered in bfloat16.
    mesh = {"fsdp": 64, "master_dtype": "float32", "reduce_dtype": "float32"}
    plan = foregrad.plan(model, tokens, tokens, optimizer=torch.optim.AdamW, device="h100", mesh=mesh)
    print(plan)
    print("\nthe page:", plan.save("plan.html"))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
