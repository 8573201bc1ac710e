"""Augmentation of whole batches: crop, flip, AutoAugment, normalisation.

Each function takes uint8 images `(B, C, H, W)` and, where it is random, one uniform number a sample and
decision, so that the same numbers give the same images wherever the batch is made.  Per image, crop, flip and
normalisation cost a few microseconds together; AutoAugment works image by image and costs some hundred, which
is what workers are for.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torchvision.transforms import AutoAugment as _TorchvisionAutoAugment
from torchvision.transforms import AutoAugmentPolicy


def random_crop(images: Tensor, padding: int, noise: NDArray[np.float64]) -> Tensor:
    """Pad with black on all sides and cut a window of the old size from each image; `noise` is `(B, 2)`."""
    B, _, height, width = images.shape
    top, left = torch.from_numpy((noise * (2 * padding + 1)).astype(np.int64)).unbind(1)
    windows = (
        F.pad(images, (padding,) * 4).unfold(2, height, 1).unfold(3, width, 1)
    )  # B, C, 2p+1, 2p+1, H, W: a view
    return windows[torch.arange(B), :, top, left]


def random_flip(images: Tensor, noise: NDArray[np.float64]) -> Tensor:
    """Mirror every other image, left to right; `noise` is `(B,)`."""
    flipped = torch.from_numpy(noise < 0.5)[:, None, None, None]
    return torch.where(flipped, images.flip(-1), images)


def normalize(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """To float32 in units of the data set's standard deviation: `(x / 255 − mean) / std`."""
    shape = (1, -1, 1, 1)
    return images.float().div_(255).sub_(torch.tensor(mean).view(shape)).div_(torch.tensor(std).view(shape))


class AutoAugment(_TorchvisionAutoAugment):
    """torchvision's AutoAugment with its five random numbers an image given from outside."""

    columns = 5

    def __init__(self, policy: AutoAugmentPolicy = AutoAugmentPolicy.CIFAR10) -> None:
        super().__init__(policy)
        self._spaces: dict[tuple[int, int], dict[str, tuple[Tensor, bool]]] = {}

    def _augmentation_space(
        self, num_bins: int, image_size: tuple[int, int]
    ) -> dict[str, tuple[Tensor, bool]]:
        if (
            image_size not in self._spaces
        ):  # rebuilding fourteen tensors for each image costs more than most operations
            self._spaces[image_size] = super()._augmentation_space(num_bins, image_size)
        return self._spaces[image_size]

    def get_params(self, transform_num: int) -> Any:
        policy, probabilities, signs = self._noise[0], self._noise[1:3], self._noise[3:5]
        return int(policy * transform_num), probabilities, signs >= 0.5

    def image(self, image: Image.Image, noise: NDArray[np.float64]) -> Image.Image:
        """Augment one image; `noise` is `(5,)`."""
        self._noise = noise
        return self(image)

    def batch(self, images: Tensor, noise: NDArray[np.float64]) -> Tensor:
        """Augment each image of a batch; `noise` is `(B, 5)`."""
        pixels = images.permute(0, 2, 3, 1).contiguous().numpy()
        out = np.stack(
            [np.asarray(self.image(Image.fromarray(x), row)) for x, row in zip(pixels, noise, strict=True)]
        )
        return torch.from_numpy(out).permute(0, 3, 1, 2)
