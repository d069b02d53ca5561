"""contrastile: exact contrastive losses without the b × b matrix, and batches of any size.

    image = F.normalize(encode(model.encode_image, pixels, sub_batch=256), dim=-1)
    text  = F.normalize(encode(model.encode_text, tokens, sub_batch=1024), dim=-1)
    loss  = ClipLoss()(image, text, model.logit_scale.exp())
    loss.backward()

CLIP is `ClipLoss`, SigLIP `SigLipLoss`, SimCLR `NTXentLoss`, SupCon `SupConLoss`, DPR `InfoNCELoss`; GradCache is
`encode`; `contrast` is the function under all of them.
"""

from __future__ import annotations

from typing import Any

from contrastile.cache import encode
from contrastile.contrast import contrast
from contrastile.modules import ClipLoss, InfoNCELoss, NTXentLoss, SigLipLoss, SupConLoss

__version__ = "0.1.0"

__all__ = ["ClipLoss", "InfoNCELoss", "NTXentLoss", "SigLipLoss", "SupConLoss", "contrast", "encode", "load"]


def __getattr__(name: str) -> Any:
    # `load` needs the extra [train]; it is imported when asked for
    if name == "load":
        from contrastile.train.checkpoint import load

        return load
    raise AttributeError(f"module 'contrastile' has no attribute {name!r}")
