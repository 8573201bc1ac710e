"""Data modules: digits (embedded), CIFAR-10, CIFAR-100, a folder of images with their classes or without."""

from ortho_vit.data.cifar import CIFAR10, CIFAR100
from ortho_vit.data.digits import Digits
from ortho_vit.data.folder import ImageFolder, UnlabelledImages

Pictures = UnlabelledImages  # its name in version 0.1

__all__ = ["CIFAR10", "CIFAR100", "Digits", "ImageFolder", "Pictures", "UnlabelledImages"]

for _module in (CIFAR10, CIFAR100, Digits, ImageFolder, UnlabelledImages):
    _module.__module__ = __name__  # the path that users write, and that checkpoints and cards keep
