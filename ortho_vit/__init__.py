from ortho_vit import _torchvision  # noqa: F401  (before anything imports torchvision)
