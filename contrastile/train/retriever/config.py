"""The recipe of a retriever: its data, encoders, loss and steps, beside the sections that every recipe has.

Part of the configuration: `train/config/` has the sections that both jobs share.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from contrastile.train.config.base import (
    ClashError,
    Count,
    Fraction,
    Instead,
    Settings,
    TokenizerFolder,
    Unused,
    Width,
    check_installed,
    kind_or,
    needs_files,
    same_for,
)
from contrastile.train.config.run import AnyRecipe, LossSettings, Steps
from contrastile.train.config.sizes import check_retriever
from contrastile.train.config.towers import GIVEN, TransformersModel, WordsTower, require_tokenizer

# files of a folder of questions, passages and judgements
BEIR = ("corpus.jsonl", "queries.jsonl", "qrels/*.tsv")


def _is_folder(data: Any) -> bool:
    return os.path.isdir(os.path.expanduser(data.source))


def _is_complete(data: Any) -> bool:
    """True for sources with passages and held-out questions of their own, and without hard negatives."""
    return data.source == "docstrings" or _is_folder(data)


class TextDataSettings(Settings):
    """Questions and passages. `source`: "docstrings", a file of questions, or a folder in BEIR's format."""

    source: str = "docstrings"
    packages: Annotated[tuple[str, ...], Unused("source", lambda data: data.source != "docstrings")] = (
        "numpy", "scipy", "torch",
    )  # fmt: skip
    corpus: Annotated[str | None, Unused("source", _is_complete, "leave it out: that has its own passages")] = None
    test: Annotated[str | None, Unused("source", _is_complete, "leave it out: that has its own held-out questions")] = (
        None
    )
    held_out: Annotated[
        float,
        Field(gt=0.0, lt=1.0),
        Unused("test", lambda data: data.test is not None, "leave either out"),
        Unused("source", _is_folder, "leave it out: the folder says what is held out"),
    ] = 0.05
    bad_rows: Fraction = 0.01
    mined: Annotated[int, Field(ge=0), Unused("negatives", lambda data: data.mined > 0 and data.negatives == 0)] = 0
    positives: Count = 1
    negatives: Annotated[
        int,
        Field(ge=0),
        Unused(
            "mined",
            lambda data: data.negatives > 0 and data.mined == 0 and _is_complete(data),
            "leave it out, or have some mined: this source has none",
            also=("source",),
        ),
    ] = 1
    query_prefix: str = ""
    passage_prefix: str = ""
    title_separator: str = " "
    cache: str = "~/.cache/contrastile"

    @field_validator("source", "corpus", "test")
    @classmethod
    def _files_exist(cls, path: str | None, info: ValidationInfo) -> str | None:
        is_source = info.field_name == "source"
        if path is None or not needs_files(info) or (path == "docstrings" and is_source):
            return path
        folder = Path(path).expanduser()
        if not folder.exists():
            kinds = '"docstrings" or a file or folder' if is_source else "a file or folder"
            raise ValueError(f'must be {kinds}; there is no "{path}"')
        if folder.suffix == ".parquet":
            check_installed("pyarrow", '"contrastile[data]"')
        if folder.is_dir() and info.field_name == "test":
            raise ValueError(f'must be a file of questions; got the folder "{path}"')
        absent = [name for name in BEIR if next(folder.glob(name), None) is None]
        if folder.is_dir() and is_source and absent:
            rule = f"must be a folder in BEIR's format, with {', '.join(BEIR)}"
            raise ValueError(f'{rule}; "{path}" has no {absent[0]}')
        return path

    @field_validator("packages")
    @classmethod
    def _packages_are_installed(cls, packages: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if info.data.get("source") == "docstrings" and needs_files(info):
            for name in packages:
                if not name.isidentifier() or find_spec(name) is None:
                    raise ValueError(f'must be installed packages; got "{name}"')
        return packages


class BagTower(Settings):
    """The small tower of the demo: a weighted mean of the tokens' vectors."""

    kind: Literal["bag"] = "bag"
    width: Width = 256


class TransformersEncoder(TransformersModel):
    """A text model. Its features are the mean over positions, the first position ("cls"), the last, or its pooler."""

    pooling: Literal["mean", "cls", "last", "pooler"] = "mean"


AnyEncoder = Annotated[BagTower | WordsTower | TransformersEncoder, Field(discriminator="kind"), kind_or("bag")]


class LoraSettings(Settings):
    """Low-rank adapters of the library peft: they alone are trained, in the layers called `targets`."""

    rank: Count = 8
    alpha: Annotated[float, Field(gt=0.0)] = 16.0
    dropout: Fraction = 0.0
    targets: tuple[str, ...] = ("query", "value")


class SubwordSettings(Settings):
    """A tokenizer of subwords or words learned from the run's own texts, or the one in `folder`."""

    kind: Annotated[Literal["bpe", "words"], GIVEN] = "bpe"
    size: Annotated[int, Field(ge=8, le=2**24), GIVEN] = 16_000
    length: Width = 256
    query_length: Width = 64
    folder: TokenizerFolder | None = None

    @model_validator(mode="after")
    def _queries_are_shorter(self) -> SubwordSettings:
        if self.query_length > self.length:
            raise ValueError(f"must have a query_length of at most length; got {self.query_length} and {self.length}")
        return self


class RetrieverSettings(Settings):
    """One encoder for `both` sides, or one each for `query` and `passage`."""

    both: Annotated[AnyEncoder | None, Instead(("query", "passage"))] = None
    query: Annotated[AnyEncoder | None, Instead(("both",))] = None
    passage: Annotated[AnyEncoder | None, Instead(("both",))] = None
    features: Width | None = None
    normalise: bool = True
    dimensions: tuple[Count, ...] = ()
    lora: LoraSettings | None = None
    tokenizer: SubwordSettings = SubwordSettings()

    @model_validator(mode="before")
    @classmethod
    def _both_or_each(cls, section: Any) -> Any:
        """Let the small encoder serve both sides where none is named."""
        if not isinstance(section, Mapping):
            return section
        named = {"query", "passage"} & section.keys()
        if "both" in section and named:
            raise ValueError("must have either both or query and passage")
        if len(named) == 1:
            raise ValueError(f"must have query and passage; got {named.pop()} alone")
        return section if "both" in section or named else {"both": {"kind": "bag"}, **section}

    @model_validator(mode="after")
    def _encoders_have_what_they_need(self) -> RetrieverSettings:
        encoders = [encoder for encoder in (self.both, self.query, self.passage) if encoder is not None]
        require_tokenizer(encoders, self.tokenizer.folder)
        if self.lora is not None and any(encoder.kind != "transformers" for encoder in encoders):
            raise ValueError('must have encoders of kind "transformers" with lora')
        return self


class RetrieverLoss(LossSettings):
    """InfoNCE from queries to passages. The scale is fixed unless `learn_scale`; DPR's dot product has a scale of 1."""

    scale: Annotated[float, Field(ge=1.0, le=100.0)] = 20.0
    learn_scale: bool = False
    label_smoothing: Fraction = 0.0
    workspace: Annotated[
        Annotated[int, Field(ge=2**20)] | None, Unused("backend", lambda loss: loss.backend == "dense")
    ] = None


class TextSubBatch(Settings):
    """Texts that each encoder sees at once or, with `query_tokens` and `passage_tokens`, so many tokens of them."""

    query: Annotated[Count, Instead(("query_tokens",))] = 64
    passage: Annotated[Count, Instead(("passage_tokens",))] = 64
    query_tokens: Annotated[Count | None, Instead(("query",))] = None
    passage_tokens: Annotated[Count | None, Instead(("passage",))] = None

    def _limits(self, side: Literal["query", "passage"]) -> tuple[int, int | None]:
        return getattr(self, side), getattr(self, f"{side}_tokens")

    def at_once(self, side: Literal["query", "passage"], length: int) -> int:
        """The number of texts of `length` tokens in a sub-batch."""
        count, tokens = self._limits(side)
        return count if tokens is None else max(1, tokens // length)

    def words(self, side: Literal["query", "passage"], length: int) -> dict[str, int | None]:
        """The arguments of `encode` that limit a sub-batch of texts padded to `length`."""
        count, tokens = self._limits(side)
        if tokens is not None:
            return {"sub_batch_tokens": tokens}
        # the most tokens that so many texts have: `encode` then cuts each sub-batch to its longest text beforehand
        return {"sub_batch": count, "sub_batch_tokens": count * length}


class RetrieverSteps(Steps):
    """Training steps on questions and passages: their sub-batches and precision."""

    sub_batch: Annotated[TextSubBatch, same_for("query", "passage")] = TextSubBatch()
    precision: Literal["float32", "bf16", "fp16"] = "float32"


class RetrieverEvaluation(Settings):
    """Probes, and at the end an answer to every held-out question: the `depth` best of all passages."""

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
    train: RetrieverSteps
    evaluate: RetrieverEvaluation = RetrieverEvaluation()

    @model_validator(mode="after")
    def _sections_fit_together(self, info: ValidationInfo) -> RetrieverRecipe:
        if not needs_files(info):
            return self
        check_retriever(self.model)
        for side, name in (("query", "query_length"), ("passage", "length")):
            tokens, length = getattr(self.train.sub_batch, f"{side}_tokens"), getattr(self.model.tokenizer, name)
            if tokens is not None and tokens < length:
                reason = f"must be at least model.tokenizer.{name}, the tokens of one text; got {tokens} and {length}"
                raise ClashError(f"train.sub_batch.{side}_tokens", reason)
        # these packages are first used late: after all texts are read, or after the training
        for key, used in (("data.mined", self.data.mined > 0), ("evaluate.bm25", self.evaluate.bm25)):
            if used:
                check_installed("bm25s", '"contrastile[search]"', key)
        if self.model.lora is not None:
            check_installed("peft", "peft", "model.lora")
        return self
