"""The losses by name: what a training script writes."""

from contrastile.modules.paired import ClipLoss, DCLLoss, SigLipLoss
from contrastile.modules.retrieval import InfoNCELoss
from contrastile.modules.views import NTXentLoss, SupConLoss

__all__ = ["ClipLoss", "DCLLoss", "InfoNCELoss", "NTXentLoss", "SigLipLoss", "SupConLoss"]
