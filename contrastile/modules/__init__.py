"""The losses by name: what a training script writes."""

from contrastile.modules.paired import ClipLoss, DCLLoss, SigLipLoss
from contrastile.modules.retrieval import GISTLoss, InfoNCELoss
from contrastile.modules.views import NTXentLoss, SupConLoss

__all__ = ["ClipLoss", "DCLLoss", "GISTLoss", "InfoNCELoss", "NTXentLoss", "SigLipLoss", "SupConLoss"]
