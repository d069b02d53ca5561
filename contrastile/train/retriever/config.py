"""What a retriever's recipe may say, beside what every recipe may.

The first station of a run with `kind = "retriever"`; like `train/config.py`, from which it takes the sections that both
jobs share.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, Tag, ValidationInfo, field_validator, model_validator

from contrastile.train.config import AnyRecipe, LossSettings, SaveSettings, Steps, fit_together
from contrastile.train.model_settings import TransformersModel, WordsTower, own_tokenizer
from contrastile.train.optim_settings import AdamWSettings, AnyOptim
from contrastile.train.settings import (
    ClashError,
    Count,
    Settings,
    Share,
    Width,
    files_matter,
    holds_tokenizer,
    installed,
    kind_or,
)
from contrastile.train.sizes import fit_texts

# the files of a folder of questions, passages and judgements
BEIR = ("corpus.jsonl", "queries.jsonl", "qrels/*.tsv")


class TextDataSettings(Settings):
    """`source`: "docstrings", a file of questions with their passages, or a folder in BEIR's format.

    `packages` are those whose docstrings are taken beside Python's own. Of a file of questions, `corpus` is a file or
    folder of further passages, `test` a file of questions that are only asked; else `held_out`, a share of them, is.
    `mined` hard negatives are looked up with BM25 for each question that has none. A step shows `positives` and
    `negatives` of each question, drawn by lot where there are more. The prefixes go before every text;
    `title_separator` between title and text.
    """

    source: str = "docstrings"
    packages: tuple[str, ...] = ("numpy", "scipy", "torch")
    corpus: str | None = None
    test: str | None = None
    held_out: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05
    bad_rows: Share = 0.01
    mined: Annotated[int, Field(ge=0)] = 0
    positives: Count = 1
    negatives: Annotated[int, Field(ge=0)] = 1
    query_prefix: str = ""
    passage_prefix: str = ""
    title_separator: str = " "
    cache: str = "~/.cache/contrastile"

    @field_validator("source", "corpus", "test")
    @classmethod
    def _files_exist(cls, path: str | None, info: ValidationInfo) -> str | None:
        if path is None or (path == "docstrings" and info.field_name == "source"):
            return path
        if files_matter(info) and not os.path.exists(os.path.expanduser(path)):
            known = '"docstrings" or ' if info.field_name == "source" else ""
            raise ValueError(f'must be {known}a file or folder; there is no "{path}"')
        folder = Path(path).expanduser()
        if files_matter(info) and folder.suffix == ".parquet":
            installed("pyarrow", '"contrastile[data]"')
        if files_matter(info) and folder.is_dir() and info.field_name == "test":
            raise ValueError(f'must be a file of questions; got the folder "{path}"')
        if files_matter(info) and folder.is_dir() and info.field_name == "source":
            absent = [name for name in BEIR if next(folder.glob(name), None) is None]
            if absent:
                raise ValueError(
                    f'must be a folder in BEIR\'s format, with {", ".join(BEIR)}; "{path}" has no {absent[0]}'
                )
        return path

    @field_validator("packages")
    @classmethod
    def _packages_are_there(cls, packages: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if info.data.get("source") == "docstrings" and files_matter(info):
            for name in packages:
                if not name.isidentifier() or find_spec(name) is None:
                    raise ValueError(f'must be installed packages; got "{name}"')
        return packages


class BagTower(Settings):
    """The small tower of the demo: a weighted mean of the tokens' vectors."""

    kind: Literal["bag"] = "bag"
    width: Width = 256


class TransformersEncoder(TransformersModel):
    """A text model of transformers; its features are the mean over its places, the first ("cls") or the last one."""

    pooling: Literal["mean", "cls", "last", "pooler"] = "mean"


AnyEncoder = Annotated[
    Annotated[BagTower, Tag("bag")]
    | Annotated[WordsTower, Tag("words")]
    | Annotated[TransformersEncoder, Tag("transformers")],
    kind_or("bag"),
]


class LoraSettings(Settings):
    """Low-rank adapters by the library peft: only they are trained, in the layers called `targets`."""

    rank: Count = 8
    alpha: Annotated[float, Field(gt=0.0)] = 16.0
    dropout: Share = 0.0
    targets: tuple[str, ...] = ("query", "value")


class SubwordSettings(Settings):
    """A tokenizer of `size` subwords ("bpe") or words, trained on the run's own texts, or that in `folder`.

    Passages are cut at `length` tokens, queries at `query_length`.
    """

    kind: Literal["bpe", "words"] = "bpe"
    size: Annotated[int, Field(ge=8, le=2**24)] = 16_000
    length: Width = 256
    query_length: Width = 64
    folder: Annotated[str | None, AfterValidator(holds_tokenizer)] = None

    @model_validator(mode="after")
    def _queries_are_shorter(self) -> SubwordSettings:
        if self.query_length > self.length:
            raise ValueError(f"must have a query_length of at most length; got {self.query_length} and {self.length}")
        return self


class RetrieverSettings(Settings):
    """One encoder for `both` sides, or one each for `query` and `passage`, which may be projected to `features`.

    With `normalise` rows have length 1 and are compared by cosine, else by dot product. `dimensions`: the loss is also
    taken on so many first features (Matryoshka), so that a search may keep these alone.
    """

    both: AnyEncoder | None = None
    query: AnyEncoder | None = None
    passage: AnyEncoder | None = None
    features: Width | None = None
    normalise: bool = True
    dimensions: tuple[Count, ...] = ()
    lora: LoraSettings | None = None
    tokenizer: SubwordSettings = SubwordSettings()

    @model_validator(mode="before")
    @classmethod
    def _both_or_each(cls, section: Any) -> Any:
        """Where no encoder is named, the small one serves both sides."""
        if not isinstance(section, Mapping):
            return section
        named = {"query", "passage"} & section.keys()
        if "both" in section and named:
            raise ValueError("must have either both or query and passage")
        if len(named) == 1:
            raise ValueError(f"must have query and passage; got {named.pop()} alone")
        return section if "both" in section or named else {"both": {"kind": "bag"}, **section}

    @model_validator(mode="after")
    def _weights_come_with_their_tokenizer(self) -> RetrieverSettings:
        own_tokenizer([self.both, self.query, self.passage], self.tokenizer.folder)
        return self

    @model_validator(mode="after")
    def _adapters_have_a_model(self) -> RetrieverSettings:
        encoders = [encoder for encoder in (self.both, self.query, self.passage) if encoder is not None]
        if self.lora is not None and any(encoder.kind != "transformers" for encoder in encoders):
            raise ValueError('must have encoders of kind "transformers" with lora')
        return self


class RetrieverLoss(LossSettings):
    """InfoNCE from queries to passages. The scale is fixed unless `learn_scale`; DPR's dot product has a scale of 1.

    `workspace`: the bytes that it may use beside its inputs and gradients; 1/64 of the device's memory by default.
    """

    scale: Annotated[float, Field(ge=1.0, le=100.0)] = 20.0
    learn_scale: bool = False
    label_smoothing: Share = 0.0
    workspace: Annotated[int, Field(ge=2**20)] | None = None

    def words(self) -> dict[str, Any]:
        """What the loss itself is made with."""
        return self.model_dump(exclude={"scale", "learn_scale"})


class TextSubBatch(Settings):
    """How many texts each encoder sees at once, or, with `query_tokens` or `passage_tokens`, how many tokens.

    Texts travel by length, and a sub-batch is as wide as its longest one: padding counts as tokens.
    """

    query: Count = 64
    passage: Count = 64
    query_tokens: Count | None = None
    passage_tokens: Count | None = None

    def at_once(self, side: Literal["query", "passage"], length: int) -> int:
        """So many texts of `length` tokens are encoded together."""
        tokens: int | None = getattr(self, f"{side}_tokens")
        count: int = getattr(self, side)
        return count if tokens is None else max(1, tokens // length)

    def words(self, side: Literal["query", "passage"], length: int) -> dict[str, int | None]:
        """What `encode` is told of texts that are padded to `length`."""
        tokens: int | None = getattr(self, f"{side}_tokens")
        if tokens is not None:
            return {"sub_batch_tokens": tokens}
        # as many tokens as so many texts have at most: then each sub-batch is cut down to its longest text beforehand
        count: int = getattr(self, side)
        return {"sub_batch": count, "sub_batch_tokens": count * length}


def _same_sub_batch(sub_batch: Any) -> Any:
    """A plain number is meant for both encoders."""
    whole = isinstance(sub_batch, int) and not isinstance(sub_batch, bool)
    return {"query": sub_batch, "passage": sub_batch} if whole else sub_batch


class RetrieverSteps(Steps):
    """The steps of encoders of queries and passages, at which precision."""

    sub_batch: Annotated[TextSubBatch, BeforeValidator(_same_sub_batch)] = TextSubBatch()
    precision: Literal["float32", "bf16", "fp16"] = "float32"


class RetrieverEvaluation(Settings):
    """`every`: the share of the run between two probes, of at most `probe` queries of each held-out part.

    At the end every held-out query is answered with the `depth` best of all passages. `match`: how answers are looked
    for where the source has some, word by word or as patterns. `bm25`: the same queries answered by BM25, beside.
    """

    every: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1
    probe: Count = 500
    depth: Count = 100
    match: Literal["string", "regex"] = "string"
    bm25: bool = True


class RetrieverRecipe(AnyRecipe):
    """A whole run of a retriever."""

    kind: Literal["retriever"] = "retriever"
    data: TextDataSettings = TextDataSettings()
    model: RetrieverSettings = RetrieverSettings.model_validate({})
    loss: RetrieverLoss = RetrieverLoss()
    optim: AnyOptim = AdamWSettings()
    train: RetrieverSteps
    evaluate: RetrieverEvaluation = RetrieverEvaluation()
    save: SaveSettings = SaveSettings()

    @model_validator(mode="after")
    def _sections_fit_together(self, info: ValidationInfo) -> RetrieverRecipe:
        fit_together(self.device, self.loss, self.optim, self.train, info)
        if files_matter(info):
            fit_texts(self.model)
        for side, length in (("query", "query_length"), ("passage", "length")) if files_matter(info) else ():
            tokens, longest = getattr(self.train.sub_batch, f"{side}_tokens"), getattr(self.model.tokenizer, length)
            if tokens is not None and tokens < longest:
                rule = f"must be at least model.tokenizer.{length}, the tokens of one text; got {tokens} and {longest}"
                raise ClashError(f"train.sub_batch.{side}_tokens", rule)
        # they come late: after all texts were read, or after the training
        for key, asked in {"data.mined": self.data.mined > 0, "evaluate.bm25": self.evaluate.bm25}.items():
            if asked and files_matter(info):
                installed("bm25s", '"contrastile[search]"', key)
        if self.model.lora is not None and files_matter(info):
            installed("peft", "peft", "model.lora")
        return self
