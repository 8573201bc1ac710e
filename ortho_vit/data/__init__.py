"""Data modules: digits (embedded), CIFAR-10, CIFAR-100, a folder of pictures."""

from ortho_vit.data.cifar import CIFAR10, CIFAR100
from ortho_vit.data.digits import Digits
from ortho_vit.data.folder import ImageFolder

__all__ = ["CIFAR10", "CIFAR100", "Digits", "ImageFolder"]
