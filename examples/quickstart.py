"""Compile a training step: a function that uses a model from outside, dropout included, and is right bit for bit.

Run with `python examples/quickstart.py`.
"""

import torch

import foregrad

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def loss_of(x, y):
    return (model(x) - y).square().mean()


compiled = foregrad.compile(loss_of, backend="eager")

for step in range(50):
    x = torch.randn(64, 8)
    y = x.sum(1, keepdim=True)
    random_state = torch.get_rng_state()
    loss = compiled(x, y)  # found by itself: the model's parameters, which get their gradients
    optimizer.zero_grad()
    loss.backward()

    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    torch.set_rng_state(random_state)
    optimizer.zero_grad()
    loss_of(x, y).backward()  # the same again, in eager
    assert all(torch.equal(a, b.grad) for a, b in zip(gradients, model.parameters(), strict=True))

    optimizer.step()
    if step % 10 == 9:
        print(f"step {step + 1}: loss {loss.item():.4f}, gradients equal to eager's")
