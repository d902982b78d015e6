"""Graphs, symmetry, molecules, tables of data, spikes."""

import torch
from torch import nn

from .client import Program, client


def graph(nodes=12, edges=40):
    return lambda: (torch.randn(nodes, 8), torch.randint(0, nodes, (2, edges)))


@client("graphs", "torch-geometric")
def geometric_gcn():
    from torch_geometric.nn import GCN

    return Program(GCN(8, 16, 2, 4, dropout=0.2), graph())


@client("graphs", "torch-geometric")
def geometric_gat():
    from torch_geometric.nn import GAT

    return Program(GAT(8, 16, 2, 4, heads=2), graph())


@client("graphs", "torch-geometric")
def geometric_batches():
    from torch_geometric.data import Batch, Data
    from torch_geometric.nn import GINConv, global_mean_pool

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = GINConv(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16)), train_eps=True)
            self.head = nn.Linear(16, 2)

        def forward(self, data):
            x = self.conv(data.x, data.edge_index).relu()
            return self.head(global_mean_pool(x, data.batch, data.num_graphs))

    def batch():
        graphs = [Data(x=torch.randn(6, 8), edge_index=torch.randint(0, 6, (2, 10))) for _ in range(3)]
        return (Batch.from_data_list(graphs),)

    return Program(Net(), batch)


@client("symmetry", "e3nn")
def e3nn_points():
    from e3nn import o3
    from e3nn.nn import Gate

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = Gate("8x0e", [torch.relu], "4x0e", [torch.sigmoid], "4x1o")
            self.product = o3.FullyConnectedTensorProduct("4x0e", "1x0e+1x1o", self.gate.irreps_in)
            self.out = o3.Linear(self.gate.irreps_out, "1x0e")

        def forward(self, x, positions):
            sh = o3.spherical_harmonics("1x0e+1x1o", positions, normalize=True, normalization="component")
            return self.out(self.gate(self.product(x, sh)))

    return Program(Layer(), lambda: (torch.randn(10, 4), torch.randn(10, 3)))


@client("molecules", "torchani")
def torchani_energies():
    import torchani

    aev = torchani.AEVComputer.like_2x(num_species=4) if hasattr(torchani.AEVComputer, "like_2x") else None
    networks = nn.Sequential(nn.Linear(aev.out_dim, 16), nn.CELU(0.1), nn.Linear(16, 1))

    class Energies(nn.Module):
        def __init__(self):
            super().__init__()
            self.aev, self.networks = aev, networks

        def forward(self, species, coordinates):
            out = self.aev(species, coordinates)
            return self.networks(getattr(out, "aevs", out)).sum((1, 2))

    return Program(Energies(), lambda: (torch.randint(0, 4, (2, 5)), torch.randn(2, 5, 3)))


@client("tables", "pytorch-tabnet")
def tabnet():
    from pytorch_tabnet.tab_network import TabNet

    groups = torch.eye(8)
    return Program(
        TabNet(8, 2, n_d=4, n_a=4, n_steps=2, virtual_batch_size=8, group_attention_matrix=groups),
        lambda: (torch.randn(16, 8),),
    )


@client("spikes", "snntorch")
def snntorch_spikes():
    import snntorch
    from snntorch import surrogate

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
            self.lif1 = snntorch.Leaky(beta=0.9, spike_grad=surrogate.fast_sigmoid())
            self.lif2 = snntorch.Leaky(beta=0.8, learn_beta=True, spike_grad=surrogate.fast_sigmoid())

        def forward(self, x):
            one, two, spikes = self.lif1.init_leaky(), self.lif2.init_leaky(), []
            for moment in x:
                spike, one = self.lif1(self.first(moment), one)
                spike, two = self.lif2(self.second(spike), two)
                spikes.append(two)
            return torch.stack(spikes)

    return Program(Net(), lambda: (torch.rand(6, 3, 8),))
