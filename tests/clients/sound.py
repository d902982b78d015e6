"""Sound and what is generated: codecs, quantisers, conformers, diffusion."""

import torch
from torch import nn

from .client import Program, client


@client("audio", "encodec")
def encodec_autoencoder():
    from encodec.modules import SEANetDecoder, SEANetEncoder

    sizes = {"channels": 1, "dimension": 8, "n_filters": 4, "ratios": [4, 2]}
    return Program(nn.Sequential(SEANetEncoder(**sizes), SEANetDecoder(**sizes)), lambda: (torch.randn(2, 1, 128),))


@client("audio", "conformer")
def conformer_blocks():
    from conformer import Conformer

    return Program(
        Conformer(dim=16, depth=2, dim_head=8, heads=2, conv_kernel_size=7, attn_dropout=0.1),
        lambda: (torch.randn(2, 12, 16),),
    )


@client("quantisation", "vector-quantize-pytorch")
def vector_quantizer():
    from vector_quantize_pytorch import VectorQuantize

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.encode, self.decode = nn.Linear(8, 8), nn.Linear(8, 8)
            self.quantize = VectorQuantize(dim=8, codebook_size=16, decay=0.9)

        def forward(self, x):
            found, _, commitment = self.quantize(self.encode(x))
            return self.decode(found), commitment

    return Program(Net(), lambda: (torch.randn(2, 10, 8),))


@client("diffusion", "diffusers")
def diffusers_unet():
    from diffusers import DDPMScheduler, UNet2DModel

    model = UNet2DModel(
        sample_size=16, in_channels=1, out_channels=1, block_out_channels=(16, 32), norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    schedule = DDPMScheduler(num_train_timesteps=100)

    def loss(module, x, times):
        noise = torch.randn_like(x)
        return nn.functional.mse_loss(module(schedule.add_noise(x, noise, times), times).sample, noise)

    return Program(model, lambda: (torch.randn(2, 1, 16, 16), torch.randint(0, 100, (2,))), loss)


@client("diffusion", "denoising-diffusion-pytorch")
def denoising_diffusion():
    from denoising_diffusion_pytorch import GaussianDiffusion, Unet

    unet = Unet(dim=8, dim_mults=(1, 2), flash_attn=False)
    return Program(
        GaussianDiffusion(unet, image_size=16, timesteps=50),
        lambda: (torch.rand(2, 3, 16, 16),),
        lambda module, x: module(x),
    )
