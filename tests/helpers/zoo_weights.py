"""A small model of the zoo, and what its card says."""

import torch

from ortho_vit.models import create_model

NAME = "ortho_vit_pico.shapes_across"
ARGUMENTS = {"depth": 1, "num_classes": 4}
PIXELS = torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
ABOUT = {
    "pixels": PIXELS,
    "labels": [0, 1, 2, 3, 0, 1, 2, 3],
    "classes": ["circle", "cross", "square", "star"],
    "data": "shapes",
    "mean": (0.5, 0.4, 0.3),
    "std": (0.25, 0.2, 0.3),
    "accuracy": {"test/top1": 0.25},
    "command": "python train.py test --ckpt_path run.ckpt",
    "optimizer": {"class_path": "StiefelSGD", "lr": 0.1},
    "recipe": {"epochs": 1},
    "arguments": ARGUMENTS,
}


def build(name=NAME, constraint="across", **kwargs):
    torch.manual_seed(0)
    return create_model(name.partition(".")[0], constraint=constraint, **{**ARGUMENTS, **kwargs}).eval()
