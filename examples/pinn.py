"""A physics-informed network: -laplace(u) = f on the unit square, u = 0 on its edge.

    python examples/pinn.py [steps]

The residual takes second derivatives of the network inside the compiled function; training differentiates a third
time. Draws the loss and the field to pinn.png with matplotlib (`pip install foregrad[examples]`), else prints them.
"""

import math
import sys

import torch

import foregrad


def residual(net: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """laplace(u) + f at points x[n, 2], where f = 2 pi^2 sin(pi x) sin(pi y)."""
    u = net(x)[:, 0] * (x * (1 - x)).prod(-1) * 16  # zero on the edge by construction
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    curvature = sum(torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(2))
    return curvature + 2 * math.pi**2 * torch.sin(math.pi * x).prod(-1)


def main(steps: int = 400) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)
    )
    loss_at = foregrad.compile(lambda x: residual(net, x).pow(2).mean(), backend="eager")
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_at(torch.rand(256, 2).requires_grad_())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    axis = torch.linspace(0, 1, 33)
    grid = torch.cartesian_prod(axis, axis)
    with torch.no_grad():
        field = (net(grid)[:, 0] * (grid * (1 - grid)).prod(-1) * 16).view(33, 33)
    exact = torch.sin(math.pi * grid).prod(-1).view(33, 33)
    print(f"loss {losses[0]:.3g} -> {losses[-1]:.3g}, largest error {(field - exact).abs().max():.3g}")
    show(losses, field)


def show(losses: list[float], field: torch.Tensor) -> None:
    try:
        import matplotlib as mpl

        mpl.use("Agg")  # a file, whether or not there is a screen
        import matplotlib.pyplot as plt
    except ImportError:
        print("`pip install foregrad[examples]` draws this, and the loss, to pinn.png")
        for row in field[::4, ::2]:
            print("".join(" .:-=+*#%@"[min(9, max(0, int(v * 10)))] for v in row.tolist()))
        return
    _, (left, right) = plt.subplots(1, 2, figsize=(9, 4))
    left.semilogy(losses)
    left.set(title="loss", xlabel="step")
    right.imshow(field.numpy(), origin="lower", extent=(0, 1, 0, 1))
    right.set(title="u")
    plt.savefig("pinn.png")
    print("drawn to pinn.png")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
