"""Handwritten digits, 8×8: the UCI set as scikit-learn ships it, so nothing is downloaded."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ortho_vit.data.datamodule import TensorDataModule
from ortho_vit.data.rng import hold_out

TEST_SHARE = 0.2
TEST_SEED = 0  # the test set is the same whatever the seed of a run


class Digits(TensorDataModule):
    """1,797 grey 8×8 images of the digits 0 to 9; a fixed fifth of them, stratified, is the test set.

    Args:
        crop: shift each training image at random by up to one of its pixels in both directions.
        image_size: side that the images are enlarged to, for networks that expect more than 8×8.
        batch_size, kwargs: see `ImageDataModule`.
    """

    classes = tuple("0123456789")
    mean, std = (0.3053,), (0.3759,)
    channels = 1
    source = "part of scikit-learn"

    def __init__(
        self, *, batch_size: int = 64, crop: bool = True, image_size: int = 8, **kwargs: Any
    ) -> None:
        super().__init__(batch_size=batch_size, crop=crop, flip=False, **kwargs)
        self._require(image_size >= 8, f"image_size must be at least 8, got {image_size}")
        self.image_size, self.padding = image_size, image_size // 8

    def read(self, train: bool) -> tuple[Tensor, Tensor]:
        from sklearn.datasets import load_digits  # here, as no other data set needs it

        values, labels = load_digits(return_X_y=True)  # 1797 × 64, from 0 to 16
        images = np.rint(values * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
        test, rest = hold_out(labels, round(TEST_SHARE * len(labels)), TEST_SEED)
        rows = rest if train else test
        chosen = torch.from_numpy(images[rows])
        if self.image_size != 8:
            enlarged = F.interpolate(chosen.float(), (self.image_size, self.image_size), mode="bilinear")
            chosen = enlarged.round().to(torch.uint8)
        return chosen, torch.from_numpy(labels[rows].astype(np.int64))
