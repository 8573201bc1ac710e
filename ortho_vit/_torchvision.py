"""Let `import torchvision` succeed beside a torch of another build.

torchvision registers fake kernels for its compiled `nms` when it is imported.  Where the compiled library cannot be loaded
(a CUDA build of torchvision beside a CPU build of torch) that operator is unknown and the import dies with "operator
torchvision::nms does not exist", and timm's with it, although data sets and transforms never call it.  Declaring the
schemas is enough.  A complete install brings them itself and is left alone.
"""

import contextlib
from importlib.util import find_spec
from pathlib import Path

import torch

_library = torch.library.Library("torchvision", "FRAGMENT")  # the declarations live as long as this object

_spec = find_spec("torchvision")
if _spec is not None and _spec.origin is not None:
    for _binary in Path(_spec.origin).parent.glob("_C.*"):
        with contextlib.suppress(OSError):  # built for another torch
            torch.ops.load_library(str(_binary))
    for _name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, _name):
            _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
