"""Gaussian processes, probabilistic programs, normalising flows."""

import torch
from torch import nn

from .client import Program, client


@client("Gaussian processes", "gpytorch")
def gpytorch_exact():
    import gpytorch

    x, y = torch.linspace(0, 1, 20), torch.randn(20)

    class Model(gpytorch.models.ExactGP):
        def __init__(self):
            super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
            self.mean = gpytorch.means.ConstantMean()
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    model = Model()
    likelihood = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    return Program(model, lambda: (x, y), lambda module, x, y: -likelihood(module(x), y))


@client("Gaussian processes", "gpytorch")
def gpytorch_variational():
    import gpytorch
    from gpytorch import variational

    class Model(gpytorch.models.ApproximateGP):
        def __init__(self):
            points = torch.linspace(0, 1, 6).unsqueeze(-1)
            q = variational.CholeskyVariationalDistribution(6)
            super().__init__(variational.VariationalStrategy(self, points, q))
            self.mean = gpytorch.means.ConstantMean()
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(2.5))

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    model, likelihood = Model(), gpytorch.likelihoods.GaussianLikelihood()
    elbo = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=20)
    return Program(model, lambda: (torch.rand(10, 1), torch.randn(10)), lambda module, x, y: -elbo(module(x), y))


@client("probabilistic programs", "pyro-ppl")
def pyro_regression():
    import pyro
    import pyro.distributions as dist
    from pyro.infer import Trace_ELBO
    from pyro.infer.autoguide import AutoNormal
    from pyro.nn import PyroModule, PyroSample

    class Model(PyroModule):
        def __init__(self):
            super().__init__()
            self.linear = PyroModule[nn.Linear](3, 1)
            self.linear.weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, 3]).to_event(2))

        def forward(self, x, y):
            mean = self.linear(x).squeeze(-1)
            with pyro.plate("data", len(x)):
                pyro.sample("y", dist.Normal(mean, 0.5), obs=y)
            return mean

    pyro.clear_param_store()  # which all models of a process have in common
    model = Model()
    guide = AutoNormal(model)
    loss = Trace_ELBO()(model, guide)
    loss(torch.zeros(4, 3), torch.zeros(4))  # makes the guide's parameters
    return Program(loss, lambda: (torch.randn(8, 3), torch.randn(8)), lambda module, x, y: module(x, y))


@client("flows", "zuko")
def zuko_splines():
    import zuko

    flow = zuko.flows.NSF(3, context=2, transforms=2, hidden_features=(16, 16))
    return Program(
        flow, lambda: (torch.randn(8, 2), torch.randn(8, 3)), lambda module, c, x: -module(c).log_prob(x).mean()
    )


@client("flows", "normflows")
def normflows_realnvp():
    import normflows

    base = normflows.distributions.base.DiagGaussian(2)
    steps = []
    for _ in range(3):
        steps += [normflows.flows.AffineCouplingBlock(normflows.nets.MLP([1, 16, 2])), normflows.flows.Permute(2)]
    return Program(
        normflows.NormalizingFlow(base, steps),
        lambda: (torch.randn(8, 2),),
        lambda module, x: -module.log_prob(x).mean(),
    )
