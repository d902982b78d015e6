"""A learned force field: a network gives the energy of a configuration, its forces are -dE/dx, fitted to known ones.

    python examples/force_field.py [steps]

Energy and forces come from one compiled function; fitting differentiates the forces again. The data are those of a
Lennard-Jones pair potential. Draws the loss and the forces to force_field.png with matplotlib
(`pip install foregrad[examples]`), else prints some.
"""

import sys

import torch

import foregrad


def pairs(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    i, j = torch.triu_indices(n, n, 1)
    return i, j


def distances(x: torch.Tensor) -> torch.Tensor:
    i, j = pairs(len(x))
    return (x[i] - x[j]).pow(2).sum(-1).sqrt()


def lennard_jones(x: torch.Tensor) -> torch.Tensor:
    return (distances(x).pow(-12) - 2 * distances(x).pow(-6)).sum()


def configuration() -> torch.Tensor:
    """Eight atoms near the corners of a cube, nowhere too close."""
    corners = torch.cartesian_prod(*[torch.tensor([0.0, 1.2])] * 3)
    return (corners + 0.12 * torch.randn(8, 3)).requires_grad_()


def main(steps: int = 300) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(2, 32), torch.nn.SiLU(), torch.nn.Linear(32, 32), torch.nn.SiLU(), torch.nn.Linear(32, 1)
    )

    def energy(x: torch.Tensor) -> torch.Tensor:
        d = distances(x)[:, None]
        return net(torch.cat((d.pow(-6), d.pow(-3)), -1)).sum()

    @foregrad.compile(backend="eager")
    def forces(x: torch.Tensor) -> torch.Tensor:
        return -torch.autograd.grad(energy(x), x, create_graph=True)[0]

    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    losses = []
    for _ in range(steps):
        x = configuration()
        wanted = -torch.autograd.grad(lennard_jones(x), x)[0]
        optimizer.zero_grad()
        loss = (forces(x) - wanted).abs().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    x = configuration()
    wanted = -torch.autograd.grad(lennard_jones(x), x)[0]
    found = forces(x).detach()
    print(f"loss {losses[0]:.3g} -> {losses[-1]:.3g}; forces of a new configuration are off by "
          f"{(found - wanted).abs().mean():.3g} of {wanted.abs().mean():.3g} on average")  # fmt: skip
    show(losses, found, wanted)


def show(losses: list[float], found: torch.Tensor, wanted: torch.Tensor) -> None:
    try:
        import matplotlib as mpl

        mpl.use("Agg")  # a file, whether or not there is a screen
        import matplotlib.pyplot as plt
    except ImportError:
        print("`pip install foregrad[examples]` draws this, and the loss, to force_field.png")
        for a, b in zip(found[:4].tolist(), wanted[:4].tolist(), strict=True):
            print("force", [round(v, 2) for v in a], "wanted", [round(v, 2) for v in b])
        return
    _, (left, right) = plt.subplots(1, 2, figsize=(9, 4))
    left.semilogy(losses)
    left.set(title="loss", xlabel="step")
    right.scatter(wanted.flatten(), found.flatten())
    right.set(title="forces", xlabel="wanted", ylabel="found")
    plt.savefig("force_field.png")
    print("drawn to force_field.png")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
