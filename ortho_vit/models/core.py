"""A linear layer whose orthonormal rows are followed by free cores."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["CoredLinear"]


class CoredLinear(nn.Linear):
    """x ↦ C O x + b, where `weight` holds O and `core` (n, r, r) the diagonal blocks of C.

    The cores act on the first n·r rows; the rows after them are used as they are.  They are multiplied into the
    weight and not applied to the output, which costs less as soon as there are d_model tokens in a batch.
    """

    core: nn.Parameter

    @classmethod
    def convert(cls, linear: nn.Linear, core: Tensor) -> None:
        """Turn `linear` into one, in place: it stays the same object, so hooks and references remain."""
        linear.__class__ = cls
        linear.register_parameter("core", nn.Parameter(core, requires_grad=linear.weight.requires_grad))

    def cored_weight(self) -> Tensor:
        """The weight of the plain linear layer that computes the same."""
        n, r, _ = self.core.shape
        constrained, rest = self.weight[: n * r], self.weight[n * r :]
        return torch.cat([(self.core @ constrained.view(n, r, -1)).flatten(0, 1), rest])

    @torch.no_grad()
    def fold(self) -> None:
        """Turn it into the plain linear layer that computes the same, in place."""
        self.weight.copy_(self.cored_weight())
        del self.core
        self.__class__ = nn.Linear  # type: ignore[assignment]

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.cored_weight(), self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, core={tuple(self.core.shape)}"
