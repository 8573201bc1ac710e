"""A timm model, constrained and fine-tuned: the optimizer is the only thing that changes in the loop.

    python examples/timm_finetune.py                                   a small DeiT from scratch, nothing is downloaded
    python examples/timm_finetune.py deit_tiny_patch16_224.fb_in1k     from timm's weights, which are downloaded

`preserve=True` keeps the function that trained weights compute: the outputs are the same before the first step.
"""

import sys

import ortho_vit  # isort: skip  (first: timm then imports beside a torchvision of another build, too)
import timm
import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F

from ortho_vit.optim import StiefelAdam

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 3}


def main(name: str | None = None, steps: int = 150) -> float:
    """Fine-tune on the digits, print the loss now and then, and return the accuracy on images held out."""
    torch.manual_seed(0)
    if name is None:
        model = timm.create_model("deit_tiny_patch16_224", num_classes=10, **SMALL)
    else:
        model = timm.create_model(name, pretrained=True, num_classes=10)
    ortho_vit.orthogonalize(model, "within", preserve=name is not None)
    optimizer = StiefelAdam(model.parameters(), lr=1e-3, weight_decay=1e-4)
    print(ortho_vit.audit(model, optimizer).summary)  # how many parameters move by which rule

    digits = load_digits()
    pixels, labels = torch.tensor(digits.images / 8 - 1, dtype=torch.float32), torch.tensor(digits.target)
    size = model.patch_embed.img_size

    def images(index: torch.Tensor) -> torch.Tensor:  # (batch, 3, height, width) in [−1, 1]
        return F.interpolate(pixels[index, None], size, mode="bilinear").expand(-1, 3, -1, -1)

    for step in range(steps):
        batch = torch.randint(len(pixels) - 360, (32,))
        loss = F.cross_entropy(model(images(batch)), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 25 == 0:
            print(f"step {step}: loss {loss:.3f}, max |XXᵀ − I| {ortho_vit.orthogonality_error(model):.1e}")
    held_out = torch.arange(len(pixels) - 360, len(pixels))
    with torch.no_grad():
        right = torch.cat([model.eval()(images(i)).argmax(1) == labels[i] for i in held_out.split(60)])
    print(f"accuracy on images held out: {right.float().mean():.1%}")
    return right.float().mean().item()


if __name__ == "__main__":
    main(*sys.argv[1:2])
