"""Images and random numbers for tests of augmentation."""

import numpy as np
import torch
import torch.nn.functional as F


def photographs(count, height=32, width=32, channels=3):
    """Smooth random images, which have the histograms and edges that noise has not."""
    coarse = torch.rand(count, channels, 5, 5, generator=torch.Generator().manual_seed(0))
    fine = F.interpolate(coarse, (height, width), mode="bicubic")
    return (fine * 300 - 20).clamp(0, 255).to(torch.uint8)


def noise(*shape):
    return np.random.default_rng(0).random(shape)
