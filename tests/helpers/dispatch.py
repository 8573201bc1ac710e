"""Modes that watch what a piece of code asks of the device."""

from contextlib import contextmanager
from unittest import mock

import torch
from torch.optim import adam as torch_adam
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

HOST_READS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "item"}
# The size of the result depends on values
HOST_READS |= {"masked_select", "_unique2", "unique_dim", "bincount"}
DECOMPOSITIONS = {"_linalg_svd", "linalg_svd", "_linalg_eigh", "linalg_eigh", "linalg_qr", "linalg_solve"}
VIEWS = {
    "view", "transpose", "slice", "narrow", "select", "unbind", "t", "detach", "unsqueeze", "as_strided", "diagonal",
    "split", "_unsafe_view", "expand", "alias", "permute", "_reshape_alias",
}  # fmt: skip


def capturable_on_cpu():
    """A context in which torch's Adam can be captured on a CPU, which then shows what an accelerator does."""
    return mock.patch.object(torch_adam, "_get_capturable_supported_devices", return_value=["cpu", "cuda"])


class NoHostReads(TorchDispatchMode):
    """Raises where the host would read the device, or copy between devices; records the kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[str] = []
        self._as_on_an_accelerator = capturable_on_cpu()

    def __enter__(self):
        self._as_on_an_accelerator.start()
        return super().__enter__()

    def __exit__(self, *exception):
        self._as_on_an_accelerator.stop()
        return super().__exit__(*exception)

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


OTHER = torch.device("meta")


class OnOtherDevice(torch.Tensor):
    """A tensor that says it is on `OTHER` and has values, in the memory of the host."""

    values: torch.Tensor

    @staticmethod
    def __new__(cls, values):
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, values.shape, values.stride(), dtype=values.dtype, device=OTHER
        )
        tensor.values = values
        return tensor

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} outside of other_device()")


@contextmanager
def other_device():
    """A second device, `OTHER`, that computes as the CPU does.

    Raises where the host would read from it, and where an operation has tensors of both devices.
    """
    with _Operations(), _Literals():
        yield


class _Literals(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.tensor and kwargs.get("device") == OTHER:
            return torch.tensor(*args, **kwargs | {"device": "cpu"}).to(OTHER)
        return function(*args, **kwargs)


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name, kwargs = function.overloadpacket.__name__, dict(kwargs or {})
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        here = [x for x in tensors if not isinstance(x, OnOtherDevice)]
        there = len(tensors) > len(here)
        target = kwargs.get("device")
        if there and (name in HOST_READS or _selects_by_mask(name, args)):
            raise AssertionError(f"{name} reads the device from the host")
        if there and target not in (None, OTHER):
            raise AssertionError(f"{name} copies to {target}")
        if there and any(x.dim() for x in here) and name != "copy_":
            raise AssertionError(f"{name} has tensors of both devices")
        if target is not None:
            kwargs["device"] = torch.device("cpu")
        args, kwargs = tree_map_only(OnOtherDevice, lambda x: x.values, (args, kwargs))
        out = function(*args, **kwargs)
        if name.endswith("_") and not name.endswith("__") and isinstance(out, torch.Tensor):
            return next(x for x in tensors) if there else out
        return tree_map_only(torch.Tensor, OnOtherDevice, out) if there or target == OTHER else out


def _selects_by_mask(name, args):
    """Whether an index is a mask; filling with one value needs no positions, and so no read."""
    masked = name in ("index", "index_put", "index_put_") and any(
        isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in args[1]
    )
    return masked and not (name.startswith("index_put") and args[2].numel() == 1)
