"""Differential equations, ordinary, stochastic and controlled; operators learned in Fourier space."""

import torch
from torch import nn

from .client import Program, client


class Field(nn.Module):
    """The right hand side of an equation."""

    noise_type, sde_type = "diagonal", "ito"

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, t, y):
        return self.net(y)

    f = forward

    def g(self, t, y):
        return 0.1 * torch.sigmoid(y)


class Solved(nn.Module):
    def __init__(self, solve):
        super().__init__()
        self.field, self.solve = Field(), solve

    def forward(self, y):
        return self.solve(self.field, y)


def states():
    return (torch.randn(4, 3),)


@client("differential equations", "torchdiffeq")
def torchdiffeq_adaptive():
    from torchdiffeq import odeint

    return Program(Solved(lambda field, y: odeint(field, y, torch.linspace(0, 1, 3))), states)


@client("differential equations", "torchdiffeq")
def torchdiffeq_adjoint():
    from torchdiffeq import odeint_adjoint

    return Program(Solved(lambda field, y: odeint_adjoint(field, y, torch.linspace(0, 1, 3), method="rk4")), states)


@client("differential equations", "torchsde")
def torchsde_paths():
    from torchsde import BrownianInterval, sdeint

    def solve(field, y):
        noise = BrownianInterval(0.0, 1.0, size=tuple(y.shape), entropy=7)
        return sdeint(field, y, torch.tensor([0.0, 0.5, 1.0]), bm=noise, dt=0.25, method="euler")

    return Program(Solved(solve), states)


@client("differential equations", "torchode")
def torchode_parallel():
    import torchode

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.field = Field()
            term = torchode.ODETerm(self.field)
            method = torchode.Dopri5(term=term)
            self.solver = torchode.AutoDiffAdjoint(method, torchode.IntegralController(1e-4, 1e-3, term=term))

        def forward(self, y):
            times = torch.linspace(0, 1, 3).expand(len(y), 3)
            return self.solver.solve(torchode.InitialValueProblem(y0=y, t_eval=times)).ys

    return Program(Net(), states)


@client("differential equations", "torchcde")
def torchcde_paths():
    import torchcde

    class Control(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 4 * 3)

        def forward(self, t, z):
            return self.net(z).tanh().view(*z.shape[:-1], 4, 3)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.start, self.control = nn.Linear(3, 4), Control()

        def forward(self, x):
            path = torchcde.CubicSpline(torchcde.hermite_cubic_coefficients_with_backward_differences(x))
            z0 = self.start(path.evaluate(path.interval[0]))
            return torchcde.cdeint(
                X=path,
                func=self.control,
                z0=z0,
                t=path.interval,
                adjoint=False,
                method="rk4",
                options={"step_size": 1.0},
            )

    return Program(Net(), lambda: (torch.randn(2, 5, 3),))


@client("learned operators", "neuraloperator")
def neuraloperator_fno():
    from neuralop.models import FNO

    return Program(
        FNO(n_modes=(4, 4), in_channels=1, out_channels=1, hidden_channels=8, n_layers=2),
        lambda: (torch.randn(2, 1, 16, 16),),
    )
