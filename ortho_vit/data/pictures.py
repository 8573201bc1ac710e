"""Pictures without labels, to be named by a trained model: what `predict --pictures` reads."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ortho_vit.data.folder import ImageFolder, PictureSet
from ortho_vit.data.picture import centre_box, decode, resized


class SquareSet(PictureSet):
    """Central squares of pictures, grey where `mean` is one number."""

    def __init__(self, paths: Sequence[Path], *, share: float, **kwargs: Any) -> None:
        super().__init__(paths, np.zeros(len(paths), np.int64), **kwargs)
        self.share = share

    def _pixels(self, path: Path, noise: NDArray[np.float64]) -> NDArray[np.uint8]:
        picture = decode(path)
        picture = resized(picture, self.image_size, centre_box(*picture.size, self.share))
        return np.asarray(picture.convert("L"))[..., None] if len(self.mean) == 1 else np.asarray(picture)


class Pictures(ImageFolder):
    """All pictures below a folder, or one picture, cut and resized for a model that knows its classes already.

    Args:
        folder: the folder, with or without folders in it, or one picture.  Files that cannot be read are left out, with
            a warning and a count.
        classes: the names of the model's classes, in their order.
        image_size: side of the square the network sees.
        mean, std: of the pixels in [0, 1], by which the model's were normalised: one number for grey, or three.
        share: how much of the shorter side the central square takes.
        batch_size, num_workers: see `ImageDataModule`.
    """

    def __init__(
        self,
        folder: str,
        *,
        classes: list[str],
        image_size: int,
        mean: list[float],
        std: list[float],
        share: float = 1.0,
        batch_size: int = 64,
        num_workers: int = 0,
    ) -> None:
        super().__init__(
            image_size=image_size, predict_root=folder, batch_size=batch_size, num_workers=num_workers
        )
        self._require(
            len(mean) == len(std) and len(mean) in (1, 3),
            f"mean and std must have 1 or 3 numbers, got {mean} and {std}",
        )
        self._require(0 < share <= 1, f"share must be in (0, 1], got {share}")
        self.classes = tuple(classes)
        self.mean, self.std, self.channels, self.share = tuple(mean), tuple(std), len(mean), share

    def _set(self, paths: list[Path], *_: Any, **__: Any) -> SquareSet:
        return SquareSet(paths, share=self.share, image_size=self.image_size, mean=self.mean, std=self.std)
