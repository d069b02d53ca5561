"""The recipe of images and texts: its data, towers, losses, steps and tests, and how they fit together.

Files and folders must be there; their contents are read before the first step.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from contrastile._errors import extra, logger
from contrastile.data.sources import PICTURES, PROMPTS, TO_BE_GIVEN, is_collection, missing, read_source
from contrastile.train.config import base
from contrastile.train.config.base import Clash, Count, FilePath, FolderPath, Settings, Unused, Width, must, needs_files
from contrastile.train.config.losses import AnyLoss, ClipSettings
from contrastile.train.config.towers import AnyImageTower, AnyTextTower, AnyWhole, OpenClipModel, size_clashes

Side = Literal["image", "text"]
Vocabulary = Annotated[int, Field(ge=8, le=2**24)]
TokenizerFolder = Annotated[
    str, base.on_disk("a folder with a tokenizer.json", lambda folder: Path(folder, "tokenizer.json").is_file(), "got")
]


class LearnedTokenizer(Settings):
    """A tokenizer learned from the run's own texts, `size` words at most, or the one in `folder`."""

    kind: str
    size: Vocabulary
    length: Width
    folder: TokenizerFolder | None = None

    def unused(self) -> Iterable[Unused]:
        return [Unused(self.folder is not None, key, ("folder",)) for key in ("kind", "size")]


class TokenizerSettings(LearnedTokenizer):
    """A tokenizer of words; "open_clip": CLIP's own, from the package open_clip."""

    kind: Literal["words", "open_clip"] = "words"
    size: Vocabulary = 8000
    length: Width = 16


def without_tokenizer(encoders: Iterable[Any], folder: str | None) -> Iterable[Clash]:
    """A text encoder with trained weights comes with its tokenizer."""
    for encoder in encoders if folder is None else ():
        origin = getattr(encoder, "folder", None)
        reason = f'must be given with the text encoder in "{origin}": its weights know its own tokens'
        yield origin is not None, "tokenizer.folder", reason


class ModelSettings(Settings):
    """Two towers, or one model for `both`, and the size of the features that they share."""

    features: Width = 256
    locked: tuple[Side, ...] = ()
    unlocked: dict[Side, Count] = Field(default_factory=dict)
    precompute: bool = False
    checkpointing: tuple[Side, ...] = ()
    image: AnyImageTower | None = None
    text: AnyTextTower | None = None
    both: AnyWhole | None = None
    tokenizer: TokenizerSettings = TokenizerSettings()
    instead: ClassVar = {"both": ("image", "text")}

    @model_validator(mode="before")
    @classmethod
    def _fill_in_towers(cls, section: Any) -> Any:
        """Give each side its small tower where no model for both is named, and open_clip its own tokenizer."""
        if not isinstance(section, Mapping):
            return section
        sides, tokenizer = [section.get(side) for side in ("both", "text")], section.get("tokenizer", {})
        clip = any(isinstance(side, Mapping) and side.get("kind") == "open_clip" for side in sides)
        if clip and isinstance(tokenizer, Mapping):
            section = {**section, "tokenizer": {"kind": "open_clip", "length": 77, **tokenizer}}
        return section if "both" in section else {"image": {"kind": "conv"}, "text": {"kind": "words"}, **section}

    def unused(self) -> Iterable[Unused]:
        yield Unused(self.both is not None, "features", ("both",), "leave it out: that model has its own")
        by, remedy = ("tokenizer.kind", "text", "both"), "leave it out: CLIP's words are given"
        yield Unused(self.tokenizer.kind == "open_clip", "tokenizer.size", by, remedy)

    def clashes(self) -> Iterable[Clash]:
        yield self.both and (self.image or self.text), "", "must have either both or image and text"
        # open_clip has a tokenizer of its own for most models
        encoders = [encoder for encoder in (self.both, self.text) if not isinstance(encoder, OpenClipModel)]
        yield from without_tokenizer(encoders, self.tokenizer.folder)
        learned = self.tokenizer.kind == "words" and self.tokenizer.folder is None
        clip = isinstance(self.both or self.text, OpenClipModel)
        reason = 'must be "open_clip", or a folder, for a text tower of open_clip; got "words"'
        yield learned and clip, "tokenizer.kind", reason
        for side in sorted(self.unlocked):
            reason = f'must be layers of a tower in model.locked; add "{side}" there'
            yield side not in self.locked, f"unlocked.{side}", reason
        learning = "image" not in self.locked or "image" in self.unlocked
        reason = 'must be false unless model.locked has "image" and none of its layers is unlocked; got true'
        yield self.precompute and learning, "precompute", reason

    def training_clashes(self) -> Iterable[Clash]:
        named = (side for side in (self.both, self.text) if isinstance(side, OpenClipModel) and side.folder)
        with_words = [side for side in named if "hf_tokenizer_name" in (side.described() or {}).get("text_cfg", {})]
        yield from without_tokenizer(with_words, self.tokenizer.folder)


class DataSettings(Settings):
    """Pairs of images and captions. `source`: "glyphs", a table (.tsv or .csv), or a collection: tar shards such as
    "a/{000..099}.tar", parquet files and folders of images, several joined by "::". Recipes for one's own data have "",
    with which they are planned and not trained.
    """

    source: str = "glyphs"
    image_size: Annotated[int, Field(ge=8, le=1024)] = 32
    # pydantic's Literal[1, 3] accepts true, which is equal to 1
    channels: Annotated[Literal[1, 3], BeforeValidator(must("must be 1 or 3; got {got}", lambda n: n is not True))] = 1
    held_out: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05
    cache: str = "~/.cache/contrastile"
    augment: bool = True
    weights: tuple[Count, ...] = ()
    max_bad_fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 0.01
    copies: Annotated[int, Field(ge=1, le=10_000)] = 1

    @field_validator("source")
    @classmethod
    def _source_is_known(cls, source: str, info: ValidationInfo) -> str:
        if source == "docstrings":
            raise ValueError('is a set of texts; set kind = "retriever" at the top of the recipe')
        # a shell leaves ~ as it is behind data.source=
        source = "::".join(map(os.path.expanduser, source.split("::")))
        parts = [] if source in ("glyphs", TO_BE_GIVEN) else read_source(source)
        if not needs_files(info):
            return source
        if source == TO_BE_GIVEN:
            raise ValueError("must be given: data.source=FOLDER of images, or a .tsv, .csv, .tar or .parquet file")
        absent = next(filter(None, map(missing, parts)), None)
        if absent == source and (os.path.exists(source) or not os.path.splitext(source)[1]):
            raise ValueError(f'must be "glyphs", a .tsv, .csv, .tar or .parquet file, or a folder; got "{source}"')
        if absent is not None:
            raise ValueError(f'no such file "{absent}"')
        if any(part.kind == ".parquet" for part in parts):
            base.refuse([base.not_installed("pyarrow", extra("data"))])
        return source

    def clashes(self) -> Iterable[Clash]:
        collection = is_collection(self.source)
        reason = f"must be 1 but for glyphs or a table, with data.augment; got {self.copies}"
        yield self.copies > 1 and (collection or not self.augment), "copies", reason
        if self.weights:
            yield not collection, "weights", f'must be left out: "{self.source}" is no collection of several sources'
            count, got = len(read_source(self.source)), len(self.weights)
            yield count != got, "weights", f"must be one for each of the {count} sources; got {got}"


class SubBatch(base.SubBatches):
    """Images and texts that an encoder sees at once; with `text_tokens`, as many texts as so many tokens allow."""

    image: Count = 256
    text: Count = 256
    text_tokens: Count | None = None
    instead: ClassVar = base.one_of("text", "text_tokens")


class TrainSettings(base.Steps):
    """Training steps on images and texts. A sub-batch above the largest batch is reduced to it. "float64" is for
    comparing ways to compute the same: after a hundred steps rounding still does not show.
    """

    sub_batch: Annotated[SubBatch, base.same_for("image", "text"), Field(validate_default=True)] = SubBatch()
    precision: Literal["auto", "float32", "float64", "bf16", "fp16"] = "float32"
    features: Literal["device", "host"] = "device"
    smallest_part: ClassVar[int] = 2

    @field_validator("sub_batch")
    @classmethod
    def _reduce_to_the_largest_batch(cls, sub_batch: SubBatch, info: ValidationInfo) -> SubBatch:
        largest = max((size for _, size in info.data.get("batch", ())), default=2**53)
        sizes = {"image": sub_batch.image, "text": sub_batch.text}
        overridden = {"train", "train.batch"} & {*(info.context or {}).get("overrides", ())}
        for side, size in sizes.items() if needs_files(info) and not overridden else ():
            if side in sub_batch.model_fields_set and size > largest:
                logger.warning("train.sub_batch.%s is %d, the largest batch, instead of %d", side, largest, size)
        return sub_batch.model_copy(update={side: min(size, largest) for side, size in sizes.items()})


KNOWN = ", ".join(f'"{name}"' for name in PROMPTS)
Templates = Annotated[str, base.on_disk(f"{KNOWN} or a file", lambda name: name in PROMPTS or os.path.isfile(name))]


class ZeroShotSettings(Settings):
    """Classify the images of `folder`, which has a sub-folder for each class, by the names of the classes.

    `classes`: a JSON file or lines of folder, tab and names. `templates`: "plain", "several" or a file with a sentence
    a line. `mapping`: a JSON file, from folder to the several classes that are right for it.
    """

    folder: FolderPath
    name: str | None = None
    classes: FilePath | None = None
    templates: Templates = "plain"
    mapping: FilePath | None = None
    among: Literal["folders", "all"] = "folders"

    @property
    def called(self) -> str:
        """The name of its measures, by default the folder's."""
        return self.name or os.path.basename(os.path.normpath(self.folder))

    def training_clashes(self) -> Iterable[Clash]:
        with os.scandir(self.folder) as entries:
            classes = [entry.path for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
        none, pictures = f'"{self.folder}" has none', ", ".join(PICTURES)
        yield not classes, "", f"must have a folder with a sub-folder for each class; {none}"
        files = (name for folder in classes for _, _, names in os.walk(folder) for name in names)
        empty = not any(name.lower().endswith(PICTURES) for name in files)
        yield empty, "", f"must have a folder with images ({pictures}) of each class; {none}"


class RetrievalSettings(Settings):
    """Find captions by images and images by captions: Karpathy's JSON, or a table (.tsv or .csv).

    `split`: of the JSON, by default "test". `images`: the folder of the images, by default the file's own.
    """

    captions: FilePath
    name: str | None = None
    images: FolderPath | None = None
    split: str | None = None

    @property
    def called(self) -> str:
        """The name of its measures, by default the file's, and behind it that of a split other than "test"."""
        split = "" if self.split in (None, "test") else f"-{self.split}"
        return self.name or os.path.splitext(os.path.basename(self.captions))[0] + split

    def training_clashes(self) -> Iterable[Clash]:
        reason = f'must be left out with a table: only Karpathy\'s JSON has splits; got "{self.split}"'
        yield self.split is not None and not self.captions.endswith(".json"), "split", reason


GAPS = must(
    "must be texts with one {} each, the place of the name", lambda prompts: {p.count("{}") for p in prompts} == {1}
)


class EvaluateSettings(Settings):
    """Probes of recall at each fraction `every` of the run, digits, and tests on other images."""

    every: base.Share = 0.1
    probe: Count = 1000
    prompts: Annotated[tuple[str, ...], AfterValidator(GAPS)] = ("{}",)
    digits: bool = True
    zero_shot: tuple[ZeroShotSettings, ...] = ()
    retrieval: tuple[RetrievalSettings, ...] = ()

    @property
    def tests(self) -> tuple[ZeroShotSettings | RetrievalSettings, ...]:
        """The tests on other images."""
        return *self.zero_shot, *self.retrieval

    def clashes(self) -> Iterable[Clash]:
        for names in ([test.called for test in tests] for tests in (self.zero_shot, self.retrieval)):
            for name in names:
                yield names.count(name) > 1, "", f'must have tests of different names; got "{name}" twice'


class Recipe(base.AnyRecipe):
    """A whole run of images and texts."""

    kind: Literal["image-text"] = "image-text"
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings.model_validate({})
    loss: AnyLoss = ClipSettings()
    train: TrainSettings
    evaluate: EvaluateSettings = EvaluateSettings()

    def unused(self) -> Iterable[Unused]:
        digits = self.evaluate.digits and self.data.source != "glyphs"
        yield Unused(digits, "evaluate.digits", ("data.source",), "leave it out: they are a test of glyphs")

    @property
    def may_stream(self) -> bool:
        """True for losses whose features may wait in host memory."""
        return self.loss.kind in ("clip", "siglip", "dcl")

    def clashes(self) -> Iterable[Clash]:
        yield from super().clashes()
        reason = "must be false with model.precompute: each image is seen once; got true"
        yield self.model.precompute and self.data.augment, "data.augment", reason
        key = self.loss.other_model
        reason = "must be left out with model.precompute: that model needs images"
        yield self.model.precompute and key, f"loss.{key}", reason
        reason = f'must be "device" with loss.kind = "{self.loss.kind}"; got "host"'
        yield self.train.features == "host" and not self.may_stream, "train.features", reason
        yield self.too_small_queue(1)
        yield self.too_few_tokens("text", noun="caption")

    def training_clashes(self) -> Iterable[Clash]:
        yield from super().training_clashes()
        yield from size_clashes(self)
