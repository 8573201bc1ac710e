import ortho_vit  # noqa: F401  (before torchvision)
