"""Data modules: digits (embedded), CIFAR-10, CIFAR-100, a folder of pictures with their classes or without."""

from ortho_vit.data.cifar import CIFAR10, CIFAR100
from ortho_vit.data.digits import Digits
from ortho_vit.data.folder import ImageFolder
from ortho_vit.data.pictures import Pictures

__all__ = ["CIFAR10", "CIFAR100", "Digits", "ImageFolder", "Pictures"]
