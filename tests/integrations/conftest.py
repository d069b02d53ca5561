"""Libraries of other projects, as far as a machine without a GPU can load them."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import torch

# torchvision's wheel is built for CUDA: beside torch for CPUs its operators do not load, and these are declared instead
OPERATORS = torch.library.Library("torchvision", "FRAGMENT")
if find_spec("torchvision"):
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        for name in ("nms", "qnms"):
            OPERATORS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
