"""The recipe of a retriever: its data, encoders, loss and steps, beside the sections that every recipe has."""

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from contrastile._errors import extra
from contrastile.data.sources import TO_BE_GIVEN
from contrastile.train.config import base
from contrastile.train.config.base import Clash, Count, Fraction, Settings, Unused, Whole, Width, needs, not_installed
from contrastile.train.config.image_text import LearnedTokenizer, Vocabulary, without_tokenizer
from contrastile.train.config.losses import AnyRetrieverLoss, RetrieverDcl, RetrieverLoss
from contrastile.train.config.towers import TransformersModel, WordsTower, size_clashes

# files of a folder of questions, passages and judgements
BEIR = ("corpus.jsonl", "queries.jsonl", "qrels/*.tsv")
SEARCH = extra("search")


class TextDataSettings(Settings):
    """Questions and passages. `source`: "docstrings", a file of questions, or a folder in BEIR's format. Recipes for
    one's own texts have "", with which they are planned and not trained.
    """

    source: str = "docstrings"
    packages: tuple[str, ...] = ("numpy", "scipy", "torch")
    corpus: str | None = None
    test: str | None = None
    held_out: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05
    bad_rows: Fraction = 0.01
    mined: Annotated[Whole, needs("bm25s", SEARCH)] = 0
    positives: Count = 1
    negatives: Whole = 1
    query_prefix: str = ""
    passage_prefix: str = ""
    title_separator: str = " "
    cache: str = "~/.cache/contrastile"

    @property
    def _is_folder(self) -> bool:
        return self.source != TO_BE_GIVEN and Path(self.source).expanduser().is_dir()

    @property
    def hard_negatives(self) -> int:
        """Hard negatives of each question: none of a source that has none, unless they are mined."""
        none = self.mined == 0 and (self.source == "docstrings" or self._is_folder)
        return 0 if none else self.negatives

    def unused(self) -> Iterable[Unused]:
        docstrings, folder = self.source == "docstrings", self._is_folder
        # with passages and held-out questions of its own, and no hard negatives
        complete = docstrings or folder
        yield Unused(not docstrings, "packages", ("source",))
        yield Unused(complete, "corpus", ("source",), "leave it out: that has its own passages")
        yield Unused(complete, "test", ("source",), "leave it out: that has its own held-out questions")
        yield Unused(self.test is not None, "held_out", ("test",), "leave either out")
        yield Unused(folder, "held_out", ("source",), "leave it out: the folder says what is held out")
        yield Unused(self.mined > 0 and self.negatives == 0, "mined", ("negatives",))
        none = self.negatives > self.hard_negatives
        remedy = "leave it out, or have some mined: this source has none"
        yield Unused(none, "negatives", ("mined", "source"), remedy)

    def training_clashes(self) -> Iterable[Clash]:
        reason = "must be given: data.source=FILE of questions and passages, or a BEIR folder"
        yield self.source == TO_BE_GIVEN, "source", reason
        for key, path in (("source", self.source), ("corpus", self.corpus), ("test", self.test)):
            if path is None or (key == "source" and path == "docstrings"):
                continue
            folder, named = Path(path).expanduser(), '"docstrings" or ' if key == "source" else ""
            yield not folder.exists(), key, f'must be {named}a file or folder; there is no "{path}"'
            if folder.suffix == ".parquet":
                yield not_installed("pyarrow", extra("data"), key)
            if folder.is_dir():
                yield key == "test", key, f'must be a file of questions; got the folder "{path}"'
                for name in BEIR if key == "source" else ():
                    reason = f'must be a folder in BEIR\'s format, with {", ".join(BEIR)}; "{path}" has no {name}'
                    yield next(folder.glob(name), None) is None, key, reason
        for name in self.packages if self.source == "docstrings" else ():
            absent = not name.isidentifier() or find_spec(name) is None
            yield absent, "packages", f'must be installed packages; got "{name}"'


class BagTower(Settings):
    """The small tower of the demo: a weighted mean of the tokens' vectors."""

    kind: Literal["bag"] = "bag"
    width: Width = 256


class TransformersEncoder(TransformersModel):
    """A text model. Its features are the mean over positions, the first position ("cls"), the last, or its pooler."""

    pooling: Literal["mean", "cls", "last", "pooler"] = "mean"


AnyEncoder = Annotated[BagTower | WordsTower | TransformersEncoder, Field(discriminator="kind"), base.kind_or("bag")]


class LoraSettings(Settings):
    """Low-rank adapters of the library peft: they alone are trained, in the layers called `targets`."""

    rank: Count = 8
    alpha: base.Positive = 16.0
    dropout: Fraction = 0.0
    targets: tuple[str, ...] = ("query", "value")


class SubwordSettings(LearnedTokenizer):
    """A tokenizer of subwords or words."""

    kind: Literal["bpe", "words"] = "bpe"
    size: Vocabulary = 16_000
    length: Width = 256
    query_length: Width = 64

    def clashes(self) -> Iterable[Clash]:
        got = f"{self.query_length} and {self.length}"
        yield self.query_length > self.length, "", f"must have a query_length of at most length; got {got}"


# keys of a retriever with many vectors
LATE_KEYS = ("query_expansion", "attend_to_expansion", "skip_punctuation", "query_marker", "passage_marker")
# size of a token's vector, as in ColBERT
TOKEN_FEATURES = 128


class RetrieverSettings(Settings):
    """One encoder for `both` sides, or one each for `query` and `passage`.

    `kind`: "single", a vector for each text; "late", one for each of its tokens.
    """

    kind: Literal["single", "late"] = "single"
    both: AnyEncoder | None = None
    query: AnyEncoder | None = None
    passage: AnyEncoder | None = None
    features: Width | None = None
    query_expansion: bool = True
    attend_to_expansion: bool = False
    skip_punctuation: bool = True
    query_marker: str = "[Q]"
    passage_marker: str = "[D]"
    normalise: bool = True
    dimensions: tuple[Count, ...] = ()
    lora: Annotated[LoraSettings | None, needs("peft", "peft")] = None
    tokenizer: SubwordSettings = SubwordSettings()
    instead: ClassVar = {"both": ("query", "passage"), "query": ("both",), "passage": ("both",)}

    @model_validator(mode="before")
    @classmethod
    def _both_or_each(cls, section: Any) -> Any:
        """Let the small encoder serve both sides where none is named, and give tokens the usual size."""
        if not isinstance(section, Mapping):
            return section
        size = {"features": TOKEN_FEATURES} if section.get("kind") == "late" else {}
        named = section.keys() & {"both", "query", "passage"}
        return size | ({} if named else {"both": {"kind": "bag"}}) | dict(section)

    def unused(self) -> Iterable[Unused]:
        late = self.kind == "late"
        for key in LATE_KEYS:
            yield Unused(not late, key, ("kind",), 'leave it out, or set model.kind = "late"')
        yield Unused(late and not self.query_expansion, "attend_to_expansion", ("query_expansion",))
        for side in ("both", "query", "passage"):
            pooled = isinstance(getattr(self, side), TransformersEncoder)
            yield Unused(late and pooled, f"{side}.pooling", ("kind",), "leave it out: each token has its vector")

    def settings(self) -> dict[str, Any]:
        """The settings of `build_retriever`, or of `build_late`."""
        if self.kind == "late":
            settings = self.model_dump(exclude={"tokenizer", "dimensions"}, exclude_none=True)
            return settings | {"query_length": self.tokenizer.query_length}
        return self.model_dump(exclude={"tokenizer", "dimensions", "kind", *LATE_KEYS}, exclude_none=True)

    def clashes(self) -> Iterable[Clash]:
        sides = [side for side in ("query", "passage") if getattr(self, side) is not None]
        yield self.both and sides, "", "must have either both or query and passage"
        yield len(sides) == 1, "", f"must have query and passage; got {''.join(sides)} alone"
        encoders = [encoder for encoder in (self.both, self.query, self.passage) if encoder is not None]
        yield from without_tokenizer(encoders, self.tokenizer.folder)
        small = any(encoder.kind != "transformers" for encoder in encoders)
        yield self.lora is not None and small, "", 'must have encoders of kind "transformers" with lora'


class TextSubBatch(base.SubBatches):
    """Texts that each encoder sees at once or, with `query_tokens` and `passage_tokens`, so many tokens of them."""

    query: Count = 64
    passage: Count = 64
    query_tokens: Count | None = None
    passage_tokens: Count | None = None
    instead: ClassVar = base.one_of("query", "query_tokens") | base.one_of("passage", "passage_tokens")


class RetrieverSteps(base.Steps):
    """Training steps on questions and passages: their sub-batches and precision."""

    sub_batch: Annotated[TextSubBatch, base.same_for("query", "passage")] = TextSubBatch()
    precision: Literal["auto", "float32", "bf16", "fp16"] = "float32"
    features: Literal["device", "host"] = "device"


class RetrieverEvaluation(Settings):
    """Probes, and at the end an answer to every held-out question: the `depth` best of all passages.

    `candidates`: the first passages of BM25 that a late retriever scores; 0: all.
    """

    every: base.Share = 0.1
    probe: Count = 500
    depth: Count = 100
    match: Literal["string", "regex"] = "string"
    bm25: bool = True
    candidates: Annotated[Whole, needs("bm25s", SEARCH)] = 0


class RetrieverRecipe(base.AnyRecipe):
    """A whole run of a retriever."""

    kind: Literal["retriever"] = "retriever"
    data: TextDataSettings = TextDataSettings()
    model: RetrieverSettings = RetrieverSettings.model_validate({})
    loss: AnyRetrieverLoss = RetrieverLoss()
    train: RetrieverSteps
    evaluate: RetrieverEvaluation = RetrieverEvaluation()

    def unused(self) -> Iterable[Unused]:
        remedy = 'leave it out, or set model.kind = "late"'
        yield Unused(self.model.kind == "single", "evaluate.candidates", ("model.kind",), remedy)

    @property
    def may_stream(self) -> bool:
        """True for losses whose features may wait in host memory: those without a queue or lists of passages."""
        loss = self.loss
        plain = isinstance(loss, RetrieverLoss) and not loss.queue and not loss.own_negatives
        return plain or isinstance(loss, RetrieverDcl)

    def clashes(self) -> Iterable[Clash]:
        yield from super().clashes()
        only = 'must be "device" but for loss.kind = "infonce" or "dcl" without a queue or own_negatives; got "host"'
        yield self.train.features == "host" and not self.may_stream, "train.features", only
        candidates, depth = self.evaluate.candidates, self.evaluate.depth
        reason = f"must be 0, or at least evaluate.depth; got {candidates} and {depth}"
        yield 0 < candidates < depth, "evaluate.candidates", reason
        data, own = self.data, getattr(self.loss, "own_negatives", False)
        late, kind, queue = self.model.kind == "late", self.loss.kind, getattr(self.loss, "queue", 0)
        reason = f'must be "infonce", "kl" or "margin_mse" with model.kind = "late"; got "{kind}"'
        yield late and kind not in ("infonce", "kl", "margin_mse"), "loss.kind", reason
        yield late and own, "loss.own_negatives", 'must be false with model.kind = "late"; got true'
        yield late and queue > 0, "loss.queue", f'must be 0 with model.kind = "late"; got {queue}'
        reason = "must be false with data.negatives = 0; got true"
        yield own and not data.negatives, "loss.own_negatives", reason
        alone = not getattr(self.loss, "in_batch", True)
        reason = f"must be 1 with loss.in_batch = false; got {data.positives}"
        yield alone and data.positives > 1, "data.positives", reason
        reason = f'must be at least 1 with data.positives = 1 and loss.kind = "{kind}"; got 0'
        yield kind in ("kl", "margin_mse") and data.positives < 2 and not data.negatives, "data.negatives", reason
        none = own or (data.mined == 0 and data.source == "docstrings")
        yield self.too_small_queue(data.positives + (0 if none else data.negatives))

    def training_clashes(self) -> Iterable[Clash]:
        yield from super().training_clashes()
        yield self.too_few_tokens("query", "query_length")
        yield self.too_few_tokens("passage")
        if self.evaluate.bm25:
            # first used after the training
            yield not_installed("bm25s", SEARCH, "evaluate.bm25")
        yield from size_clashes(self)
