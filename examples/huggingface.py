"""A Hugging Face model, constrained: `orthogonalize` finds the attention of `transformers` models too.

    pip install transformers
    python examples/huggingface.py

The model is a small, untrained ViT, so nothing is downloaded; `ViTForImageClassification.from_pretrained(...)` goes the
same way, with `preserve=True` to keep the function that its weights compute.  In `transformers.Trainer` the optimizer is
given as `optimizers=(StiefelSGD(model.parameters(), lr=0.05), None)`.
"""

import sys

import ortho_vit  # isort: skip  (first: transformers then imports beside a torchvision of another build, too)
import torch
from sklearn.datasets import load_digits

from ortho_vit.optim import StiefelSGD

try:
    from transformers import ViTConfig, ViTForImageClassification
except ModuleNotFoundError:
    sys.exit("examples/huggingface.py needs transformers: pip install transformers")

SMALL = {"image_size": 8, "patch_size": 2, "num_channels": 1, "hidden_size": 48, "intermediate_size": 96}


def main(steps: int = 300) -> float:
    """Train on the digits, print the loss now and then, and return the accuracy on images held out."""
    torch.manual_seed(0)
    model = ViTForImageClassification(
        ViTConfig(**SMALL, num_hidden_layers=2, num_attention_heads=3, num_labels=10)
    )
    ortho_vit.orthogonalize(model, "within")
    optimizer = StiefelSGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-5)
    print(ortho_vit.audit(model, optimizer))  # every parameter: how it moves, and what is wrong

    digits = load_digits()
    images = torch.tensor(digits.images / 8 - 1, dtype=torch.float32)[:, None]  # (batch, 1, 8, 8)
    labels = torch.tensor(digits.target)
    for step in range(steps):
        batch = torch.randint(len(images) - 360, (64,))
        loss = model(pixel_values=images[batch], labels=labels[batch]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss:.3f}, max |XXᵀ − I| {ortho_vit.orthogonality_error(model):.1e}")
    with torch.no_grad():
        logits = model.eval()(pixel_values=images[-360:]).logits
    accuracy = (logits.argmax(1) == labels[-360:]).float().mean().item()
    print(f"accuracy on images held out: {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
