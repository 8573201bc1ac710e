"""Modes that watch what a piece of code asks of the device."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

HOST_READS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "item"}
DECOMPOSITIONS = {"_linalg_svd", "linalg_svd", "_linalg_eigh", "linalg_eigh", "linalg_qr", "linalg_solve"}
VIEWS = {
    "view", "transpose", "slice", "narrow", "select", "unbind", "t", "detach", "unsqueeze", "as_strided", "diagonal",
    "split", "_unsafe_view", "expand", "alias", "permute", "_reshape_alias",
}  # fmt: skip


class NoHostReads(TorchDispatchMode):
    """Raises where the host would read the device, or copy between devices; records the kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in HOST_READS or name in DECOMPOSITIONS:
            raise AssertionError(f"{name} reads the device from the host")
        out = function(*args, **(kwargs or {}))
        if name in ("_to_copy", "copy_"):
            devices = {x.device.type for x in (*args, out) if isinstance(x, torch.Tensor)}
            if len(devices) > 1:
                raise AssertionError(f"{name} copies between {devices}")
        if name not in VIEWS and function.namespace == "aten":
            self.kernels.append(name)
        return out
