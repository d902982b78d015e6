"""Images: classification, segmentation, medicine, differentiable image processing, embeddings."""

import torch
from torch import nn

from .client import Program, client


def images(size, channels=3, count=2):
    return lambda: (torch.randn(count, channels, size, size),)


@client("vision", "torchvision")
def torchvision_resnet18():
    from torchvision.models import resnet18

    return Program(resnet18(num_classes=10), images(64))


@client("vision", "timm")
def timm_convnext():
    import timm

    return Program(timm.create_model("convnext_atto", num_classes=10, drop_path_rate=0.1), images(64))


@client("vision", "vit-pytorch")
def vit_pytorch():
    from vit_pytorch import ViT

    return Program(
        ViT(image_size=32, patch_size=8, num_classes=10, dim=32, depth=2, heads=2, mlp_dim=64, dropout=0.1), images(32)
    )


@client("segmentation", "segmentation-models-pytorch")
def segmentation_unet():
    import segmentation_models_pytorch as smp

    dice = smp.losses.DiceLoss("binary")
    return Program(
        smp.Unet("resnet18", encoder_weights=None, classes=1),
        lambda: (torch.randn(2, 3, 64, 64), torch.randint(0, 2, (2, 1, 64, 64)).float()),
        lambda module, x, mask: dice(module(x), mask),
    )


@client("medicine", "monai")
def monai_unet():
    from monai.losses import DiceCELoss
    from monai.networks.nets import UNet

    loss = DiceCELoss(to_onehot_y=True, softmax=True)
    return Program(
        UNet(spatial_dims=3, in_channels=1, out_channels=2, channels=(4, 8, 16), strides=(2, 2), num_res_units=1),
        lambda: (torch.randn(1, 1, 16, 16, 16), torch.randint(0, 2, (1, 1, 16, 16, 16))),
        lambda module, x, label: loss(module(x), label),
    )


@client("image processing", "kornia")
def kornia_registration():
    import kornia

    class Align(nn.Module):
        def __init__(self):
            super().__init__()
            self.angle, self.shift = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1, 2))

        def forward(self, x):
            turned = kornia.geometry.rotate(x, self.angle.expand(len(x)))
            return kornia.filters.gaussian_blur2d(
                kornia.geometry.translate(turned, self.shift.expand(len(x), 2)), (3, 3), (1.0, 1.0)
            )

    return Program(
        Align(),
        lambda: (torch.rand(2, 3, 32, 32), torch.rand(2, 3, 32, 32)),
        lambda module, x, y: kornia.losses.ssim_loss(module(x), y, 5),
    )


@client("embeddings", "pytorch-metric-learning")
def metric_learning():
    from pytorch_metric_learning.losses import ContrastiveLoss

    loss = ContrastiveLoss()
    return Program(
        nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)),
        lambda: (torch.randn(12, 8), torch.arange(12) % 3),
        lambda module, x, labels: loss(module(x), labels),
    )
