"""contrastile: exact contrastive losses without the b × b matrix, and batches of any size.

    image = F.normalize(encode((model, "encode_image"), pixels, sub_batch=256), dim=-1)
    text  = F.normalize(encode((model, "encode_text"), tokens, sub_batch=1024), dim=-1)
    loss  = ClipLoss()(image, text, model.logit_scale.exp())
    loss.backward()

CLIP is `ClipLoss`, SigLIP `SigLipLoss`, SimCLR `NTXentLoss`, SupCon `SupConLoss`, and DPR `InfoNCELoss`. GradCache is
`encode`; `Ragged` is its input of packed values. `contrast` is the function under all losses, and takes a learned
distance of `contrastile.scorers` too. `load` returns the encoders of a finished run. `plan` returns the memory and the
time of a run to come.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contrastile.functional import contrast
    from contrastile.gradcache.encode import encode
    from contrastile.gradcache.inputs import Ragged
    from contrastile.losses.queue import KeyQueue
    from contrastile.modules import (
        ClipLoss,
        DCLLoss,
        DistillClipLoss,
        GISTLoss,
        InfoNCELoss,
        NTXentLoss,
        ScoreDistillLoss,
        SigLipLoss,
        SupConLoss,
    )
    from contrastile.train.load import load
    from contrastile.train.plan import plan

__version__ = "0.2.0"

__all__ = [
    "ClipLoss", "DCLLoss", "DistillClipLoss", "GISTLoss", "InfoNCELoss", "KeyQueue", "NTXentLoss", "Ragged",
    "ScoreDistillLoss", "SigLipLoss", "SupConLoss", "contrast", "encode", "load", "plan",
]  # fmt: skip

# the module of each public name, imported when the name is first used, so that the command line can refuse a bad recipe
# before torch is loaded
_HOMES = dict.fromkeys(__all__, "modules") | {
    "KeyQueue": "losses.queue",
    "Ragged": "gradcache.inputs",
    "contrast": "functional",
    "encode": "gradcache.encode",
    "load": "train.load",
    "plan": "train.plan",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        # name and module let Python suggest the name that was meant
        raise AttributeError(f"module 'contrastile' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    value = getattr(import_module(f"contrastile.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
