"""The losses by name: what a training script writes."""

from contrastile.modules.paired import ClipLoss, DCLLoss, DistillClipLoss, SigLipLoss
from contrastile.modules.retrieval import GISTLoss, InfoNCELoss, ScoreDistillLoss
from contrastile.modules.views import NTXentLoss, SupConLoss

__all__ = [
    "ClipLoss", "DCLLoss", "DistillClipLoss", "GISTLoss", "InfoNCELoss", "NTXentLoss", "ScoreDistillLoss",
    "SigLipLoss", "SupConLoss",
]  # fmt: skip
