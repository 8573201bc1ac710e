"""A plain PyTorch training loop: a small transformer whose query and key projections stay orthonormal.

    python examples/plain_pytorch.py

It reads the 8×8 images of handwritten digits that come with scikit-learn, one row of pixels per token.
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import ortho_vit
from ortho_vit.optim import StiefelSGD


class RowTransformer(nn.Module):
    def __init__(self, dim: int = 32, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(8, dim)
        self.position = nn.Parameter(0.02 * torch.randn(8, dim))
        layer = nn.TransformerEncoderLayer(dim, heads, 2 * dim, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(dim, 10)

    def forward(self, images: Tensor) -> Tensor:  # (batch, 8 rows, 8 pixels)
        return self.head(self.encoder(self.embed(images) + self.position).mean(1))


def main(epochs: int = 20) -> float:
    """Train, print one line per epoch, and return the accuracy on the last 360 images."""
    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.images / 16, dtype=torch.float32), torch.tensor(digits.target)
    train, test = slice(0, -360), slice(-360, None)

    model = ortho_vit.orthogonalize(RowTransformer(), "within")  # W^Q and W^K of every head
    optimizer = StiefelSGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-5)
    print(ortho_vit.audit(model, optimizer))  # every parameter: how it moves, and what is wrong
    accuracy = 0.0
    for epoch in range(epochs):
        for batch in torch.randperm(len(images[train])).split(64):
            loss = F.cross_entropy(model(images[train][batch]), labels[train][batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean().item()
        error = ortho_vit.orthogonality_error(model)
        print(f"epoch {epoch + 1}: test accuracy {accuracy:.1%}, max |XXᵀ − I| {error:.1e}")
    return accuracy


if __name__ == "__main__":
    main()
