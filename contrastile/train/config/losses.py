"""The section `[loss]` of both jobs: a class for each loss, with a key for each of its own fields.

A field that the loss's constructor takes too has its name and default; the constructor checks its value when the run
opens, before any data are read.
"""

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from contrastile.train.config import base
from contrastile.train.config.base import Clash, FolderPath, Fraction, LossSettings, Positive, Scale, Unused, kind_or


class Hardness(LossSettings):
    """InfoNCELoss. Negatives have the weight exp(hardness_strength · similarity). `queue`: keys of earlier steps."""

    kind: Literal["infonce"] = "infonce"
    label_smoothing: Fraction = 0.0
    hardness_strength: base.NotNegative = 0.0
    hardness_mode: str = "all_negatives"
    queue: base.Whole = 0

    def words(self) -> dict[str, Any]:
        words = super().words()
        if not self.hardness_strength:
            del words["hardness_mode"]
        return words

    def unused(self) -> Iterable[Unused]:
        yield from super().unused()
        yield Unused(not self.hardness_strength, "hardness_mode", ("hardness_strength",))

    def clashes(self) -> Iterable[Clash]:
        yield from super().clashes()
        none = self.hardness_mode == "hard_negatives" and not getattr(self, "own_negatives", False)
        reason = 'must be "in_batch_negatives" or "all_negatives": no query has negatives of its own; '
        yield none, "hardness_mode", reason + 'got "hard_negatives"'


class Guided(LossSettings):
    """GISTLoss. `guide`: the folder of a run, or of a model of transformers, that encodes the same batch.

    `contrast_anchors`, `contrast_positives`: pairs of queries, and pairs of their keys, are compared too.
    """

    other_model: ClassVar = "guide"
    kind: Literal["gist"] = "gist"
    label_smoothing: Fraction = 0.0
    guide: FolderPath
    margin: float = 0.0
    margin_strategy: str = "absolute"
    contrast_anchors: bool = False
    contrast_positives: bool = False


class Distilled(LossSettings):
    """A distillation from `teacher`, a folder as `guide` is. `teacher_scale`: in the place of the teacher's own."""

    other_model: ClassVar = "teacher"
    kind: Literal["distill"] = "distill"
    teacher: FolderPath
    teacher_scale: Positive | None = None
    weight: float = 0.5


class ClipSettings(LossSettings):
    """ClipLoss. `labels`: pairs of equal captions are positives of each other, instead of being left out."""

    kind: Literal["clip"] = "clip"
    label_smoothing: Fraction = 0.0
    labels: bool = False


class SigLipSettings(LossSettings):
    """SigLipLoss. The learned scale and bias start at `scale` and `bias`, by default SigLIP's values."""

    kind: Literal["siglip"] = "siglip"
    scale: Scale = 10.0
    bias: Annotated[float, Field(ge=-1e4, le=1e4)] = -10.0
    labels: bool = False
    balanced: bool = False

    def unused(self) -> Iterable[Unused]:
        yield Unused(not self.labels, "balanced", ("labels",), "leave it out, or set loss.labels = true")


class DclSettings(LossSettings):
    """DCLLoss; with `sigma` positives have von Mises-Fisher weights."""

    kind: Literal["dcl"] = "dcl"
    sigma: Positive | None = None
    labels: bool = False


class SupConSettings(LossSettings):
    """SupConLoss of images and texts together: a caption is the label of its images and of itself."""

    kind: Literal["supcon"] = "supcon"
    form: str = "out"


class NTXentSettings(LossSettings):
    """NTXentLoss: an image and its caption are the two views of an example."""

    kind: Literal["ntxent"] = "ntxent"
    label_smoothing: Fraction = 0.0


AnyLoss = Annotated[
    ClipSettings | SigLipSettings | DclSettings | SupConSettings | NTXentSettings | Hardness | Guided | Distilled,
    Field(discriminator="kind"),
    kind_or("clip"),
]


class OfQueries(LossSettings):
    """A loss from queries to passages. The scale is fixed unless `learn_scale`; DPR's dot product has a scale of 1."""

    scale: Scale = 20.0
    learn_scale: bool = False
    workspace: Annotated[int, Field(ge=2**20)] | None = None

    def unused(self) -> Iterable[Unused]:
        yield from super().unused()
        yield Unused(self.backend == "dense", "workspace", ("backend",))


class RetrieverLoss(OfQueries, Hardness):
    """InfoNCELoss. `own_negatives`: hard negatives meet their own query only; without `in_batch` positives do too."""

    own_negatives: bool = False
    in_batch: bool = True

    def clashes(self) -> Iterable[Clash]:
        yield from super().clashes()
        alone = not self.in_batch
        yield alone and not self.own_negatives, "in_batch", "must be true without loss.own_negatives; got false"
        yield alone and self.queue > 0, "queue", f"must be 0 with loss.in_batch = false; got {self.queue}"


class RetrieverGuided(OfQueries, Guided):
    """GISTLoss."""


class RetrieverDistilled(OfQueries, Distilled):
    """The softmax loss of one direction, mixed with a distillation."""


class RetrieverDcl(OfQueries):
    """The decoupled loss of one direction; with `sigma` positives have von Mises-Fisher weights."""

    kind: Literal["dcl"] = "dcl"
    sigma: Positive | None = None


class RetrieverScores(OfQueries):
    """ScoreDistillLoss, by the scores of the data times `score_scale`, has the `weight`, and InfoNCELoss the rest."""

    own: ClassVar = LossSettings.own - {"kind"} | {"weight"}
    kind: Literal["kl", "margin_mse"]
    weight: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    score_scale: Positive = 1.0


AnyRetrieverLoss = Annotated[
    RetrieverLoss | RetrieverGuided | RetrieverDistilled | RetrieverDcl | RetrieverScores,
    Field(discriminator="kind"),
    kind_or("infonce"),
]
