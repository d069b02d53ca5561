"""The sections that every recipe has, and the rules and types that all sections are made of.

Rules about files, packages and devices hold only for a recipe that is to be trained (`needs_files`), so that a run
folder stays readable after its data are gone.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from itertools import pairwise
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from contrastile._errors import extra, invalid

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Share = Annotated[float, Field(gt=0.0, le=1.0)]
Scale = Annotated[float, Field(ge=1.0, le=100.0)]
Positive = Annotated[float, Field(gt=0.0)]
# a smaller eps is 0 in float32, and updates a weight whose gradient is 0 by 0 / 0
Eps = Annotated[float, Field(ge=1e-30, le=1.0)]
NotNegative = Annotated[float, Field(ge=0.0)]
Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
# bounds on the examples of a run and on the sizes of tensors: more is a slip of the keyboard
Many = Annotated[int, Field(ge=1, le=2**53)]
Width = Annotated[int, Field(ge=1, le=2**20)]

DEVICE, DEVICE_RULE = re.compile(r"auto|cpu|cuda(:[0-9]+)?"), 'be "auto", "cpu", "cuda" or "cuda:1"'

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
NAME_RULE = 'must be a folder name of letters, digits, ".", "_" and "-", a letter or digit first; got {got}'

# the smallest batch that `train.epoch_steps` leaves, because a pair needs negatives
LEAST = 16

# the condition under which a value is refused, its key within the section ("": the section itself), and the sentence
Clash = tuple[Any, str, str]


class Unused(NamedTuple):
    """A rule of a section: if `when` is true, `key` has no effect because of the keys `by`. `reason`: the remedy."""

    when: bool
    key: str
    by: tuple[str, ...]
    reason: str = "leave it out"


class Settings(BaseModel):
    """A section of a recipe: exact types (the text "8" is no number), no unknown keys, finite numbers, frozen.

    `instead`: for a key, the keys that it replaces. An override of the key removes these from the file; if it is given
    and has no default, their defaults are unused.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    instead: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def unused(self) -> Iterable[Unused]:
        """The rules about keys without effect."""
        return ()

    def clashes(self) -> Iterable[Clash]:
        """The rules between keys; the first whose condition is true refuses the recipe."""
        return ()

    def training_clashes(self) -> Iterable[Clash]:
        """Further rules, for a recipe that is to be trained on this machine."""
        return ()

    def either(self, first: str, second: str) -> Clash:
        """The clash of a section that has none, or both, of two keys."""
        wrong = (getattr(self, first) is None) == (getattr(self, second) is None)
        return wrong, "", f"must have either {first} or {second}, and not both"

    @model_validator(mode="after")
    def _refuse_clashes(self, info: ValidationInfo) -> Self:
        refuse(self.clashes())
        if needs_files(info):
            refuse(self.training_clashes())
        return self


def refuse(clashes: Iterable[Clash]) -> None:
    for wrong, key, reason in clashes:
        if wrong:
            raise PydanticCustomError("clash", reason, {"key": key})


def one_of(*names: str) -> dict[str, tuple[str, ...]]:
    """The `instead` of keys that replace each other."""
    return {name: tuple(other for other in names if other != name) for name in names}


def unused_keys(section: Settings, prefix: str = "") -> Iterator[Unused]:
    """The unused keys of a validated recipe, with their dotted names and the whole sentence."""
    fields, rules = type(section).model_fields, [*section.unused()]
    for name, others in section.instead.items():
        given = fields[name].default is None and getattr(section, name) is not None
        for other in others:
            rules.append(Unused(given and fields[other].default is not None, other, (name,), "leave either out"))
    for when, key, by, remedy in rules:
        if when:
            value = attrgetter(by[0])(section)
            shown = "" if isinstance(value, Settings) else f" = {json.dumps(value, ensure_ascii=False)}"
            reason = f"has no effect with {prefix}{by[0]}{shown}; {remedy}"
            yield Unused(when, prefix + key, tuple(prefix + deciding for deciding in by), reason)
    for name, value in section:
        if isinstance(value, Settings):
            yield from unused_keys(value, f"{prefix}{name}.")


def known_keys(annotation: Any, prefix: str = "") -> Iterator[tuple[str, type[Settings]]]:
    """Every dotted key of a section, or of a union of sections, with its section; once for each member that has it."""
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        for name, field in annotation.model_fields.items():
            yield prefix + name, annotation
            yield from known_keys(field.annotation, f"{prefix}{name}.")
    for part in get_args(annotation):
        yield from known_keys(part, prefix)


def needs_files(info: ValidationInfo) -> bool:
    """True for a recipe that is to be trained, false for one that is read back from its run folder."""
    return bool((info.context or {}).get("files"))


def kind_or(default: str) -> BeforeValidator:
    """Give a section of several kinds its default `kind`; `Field(discriminator="kind")` then chooses the class."""
    return BeforeValidator(lambda section: {"kind": default, **section} if isinstance(section, Mapping) else section)


def same_for(*names: str) -> BeforeValidator:
    """Take one number for each of several keys of a section."""
    return BeforeValidator(lambda value: dict.fromkeys(names, value) if type(value) is int else value)


def must(sentence: str, holds: Callable[[Any], object], *, files: bool = False) -> Callable[[Any, ValidationInfo], Any]:
    """A validator that refuses a value unless it `holds`; with `files`, only in a recipe that is to be trained."""

    def check(value: Any, info: ValidationInfo) -> Any:
        if (needs_files(info) or not files) and not holds(value):
            raise ValueError(sentence.replace("{got}", json.dumps(value, ensure_ascii=False, default=str)))
        return value

    return check


CHOICE_RULE = 'must be "auto", true or false; got {got}'
Choice = Annotated[bool | Literal["auto"], BeforeValidator(must(CHOICE_RULE, lambda x: x in (True, False, "auto")))]


def on_disk(kind: str, is_there: Callable[[str], bool], got: str = "there is no") -> AfterValidator:
    """Refuse a path that is missing before the training."""
    return AfterValidator(must(f"must be {kind}; {got} {{got}}", is_there, files=True))


FilePath = Annotated[str, on_disk("a file", os.path.isfile)]
FolderPath = Annotated[str, on_disk("a folder", os.path.isdir)]


def not_installed(package: str, source: str, key: str = "") -> Clash:
    """The clash of a package that is not installed; `source` is the argument of pip."""
    reason = f"needs the package {package}, which is not installed; run: pip install {source}"
    return find_spec(package) is None, key, reason


def needs(package: str, source: str) -> AfterValidator:
    """Refuse a value, unless it is false or empty, without an installed package; `source` is the argument of pip."""
    sentence = not_installed(package, source)[2]
    return AfterValidator(must(sentence, lambda value: not value or find_spec(package), files=True))


def known_device(name: str) -> str:
    """A device as the command line names it; torch checks later that the machine has it."""
    if not DEVICE.fullmatch(name):
        raise invalid("--device", DEVICE_RULE, f'"{name}"', "Leave it out for the best device of the machine.")
    if name.startswith("cuda") and torch_is_cpu_only():
        rule = 'be "auto" or "cpu" with a torch for CPUs alone'
        raise invalid("--device", rule, f'"{name}"', "Install one for CUDA.")
    return name


def torch_is_cpu_only() -> bool:
    """True where a torch for CPUs alone is installed, by its version: loading torch takes seconds.

    False where torch is loaded already, because torch itself is then asked a moment later.
    """
    return "torch" not in sys.modules and version("torch").endswith("+cpu")


class LossSettings(Settings):
    """Settings of every loss: `backend`, `exchange` and `gradient` are the arguments of that name.

    `scale`: where a learned one starts; 14.3 is CLIP's temperature of 0.07. `other_model`: the key of the folder whose
    model encodes the same batch, for losses that need one.
    """

    backend: Literal["auto", "dense", "eager", "triton"] = "auto"
    exchange: Literal["auto", "single", "replicate", "gather", "ring", "hierarchical"] = "auto"
    gradient: Literal["mean", "sum"] = "mean"
    scale: Scale = 14.3
    other_model: ClassVar[str] = ""
    # keys that are no keywords of the loss module: they choose its inputs
    own: ClassVar[frozenset[str]] = frozenset(
        {"kind", "scale", "bias", "learn_scale", "labels", "queue"}
        | {"guide", "teacher", "teacher_scale", "own_negatives", "score_scale"}
    )

    def words(self) -> dict[str, Any]:
        """The keyword arguments of the loss module."""
        return self.model_dump(exclude={*self.own})


class OptimSettings(Settings):
    """Settings of every optimizer.

    With `rate_scaling` a step of b pairs has the rate times b / base_batch ("linear"), or times its root ("sqrt").
    """

    # a larger rate can make finite weights non-finite in a single step
    learning_rate: Annotated[float, Field(gt=0.0, le=1e3)] = 1e-3
    rate_scaling: Literal["none", "sqrt", "linear"] = "none"
    base_batch: Many | None = None
    weight_decay: Annotated[float, Field(ge=0.0, le=1e3)] = 0.1
    schedule: Literal["cosine", "linear", "constant", "cooldown"] = "cosine"
    warmup: Fraction = 0.05
    warmup_steps: Count | None = None
    warmup_epochs: Annotated[float, Field(gt=0.0, le=1e6)] | None = None
    cooldown: Share = 0.2
    final: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    clip_norm: NotNegative = 1.0
    ema: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    instead: ClassVar = one_of("warmup", "warmup_steps", "warmup_epochs")

    def unused(self) -> Iterable[Unused]:
        remedy = 'leave it out, or set optim.rate_scaling = "sqrt" or "linear"'
        yield Unused(self.rate_scaling == "none", "base_batch", ("rate_scaling",), remedy)
        remedy = 'leave it out, or set optim.schedule = "cooldown"'
        yield Unused(self.schedule != "cooldown", "cooldown", ("schedule",), remedy)
        yield Unused(self.schedule == "constant", "final", ("schedule",))

    def clashes(self) -> Iterable[Clash]:
        in_steps, in_epochs = self.warmup_steps is not None, self.warmup_epochs is not None
        # recipes that earlier versions wrote hold the default of `warmup` beside `warmup_steps`
        as_share = self.warmup != type(self).model_fields["warmup"].default
        yield as_share + in_steps + in_epochs > 1, "", "must have one of warmup, warmup_steps and warmup_epochs"
        too_long = not in_steps and not in_epochs and self.warmup + self.cooldown > 1
        reason = f"must leave the warm-up its share of {self.warmup:g}; got {self.cooldown:g}"
        yield too_long and self.schedule == "cooldown", "cooldown", reason
        reason = f'must be given with optim.rate_scaling = "{self.rate_scaling}": the batch of that rate'
        yield self.rate_scaling != "none" and self.base_batch is None, "base_batch", reason


class AdamWSettings(OptimSettings):
    """torch.optim.AdamW."""

    kind: Literal["adamw"] = "adamw"
    betas: tuple[Fraction, Fraction] = (0.9, 0.98)
    eps: Eps = 1e-8


class AdafactorSettings(OptimSettings):
    """Adafactor as vision transformers are trained with it: second moments by row and column, momentum betas[0].

    The second moment decays by 1 - t^beta2_decay, but never slower than betas[1]. `weight_decay` follows the schedule
    of the rate, not its height.
    """

    kind: Literal["adafactor"] = "adafactor"
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    beta2_decay: Annotated[float, Field(lt=0.0)] = -0.8
    weight_decay: Fraction = 1e-4


class MuonSettings(OptimSettings):
    """Muon with `momentum` for the matrices of the towers, AdamW for all other weights, both at one learning rate."""

    kind: Literal["muon"] = "muon"
    momentum: Fraction = 0.95
    betas: tuple[Fraction, Fraction] = (0.9, 0.98)
    eps: Eps = 1e-8


AnyOptim = Annotated[AdamWSettings | AdafactorSettings | MuonSettings, Field(discriminator="kind"), kind_or("adamw")]


class SubBatches(Settings):
    """Examples of each side that its encoder sees at once, or with a key `<side>_tokens` so many tokens of them."""

    def tokens(self, side: str) -> int | None:
        """The number of tokens, where the key is given."""
        return getattr(self, f"{side}_tokens", None)

    def at_once(self, side: str, length: int) -> int:
        """The number of texts of `length` tokens in a sub-batch."""
        return getattr(self, side) if (tokens := self.tokens(side)) is None else max(1, tokens // length)

    def words(self, side: str, length: int | None = None) -> dict[str, Any]:
        """The arguments of `encode` that limit a sub-batch, of texts that are padded to `length`."""
        count, tokens = getattr(self, side), self.tokens(side)
        if tokens is None and length is None:
            return {"sub_batch": count}
        # the most tokens that so many texts have: `encode` then cuts each sub-batch to its longest text beforehand
        return {"sub_batch_tokens": tokens} if tokens else {"sub_batch": count, "sub_batch_tokens": count * length}


def _constant_schedule(batch: Any) -> Any:
    """Take a plain number as a schedule of one stage."""
    if type(batch) is int:
        return ((0.0, batch),)
    if not isinstance(batch, tuple | list):
        rule = "must be a whole number, or a list of [share of the run, size]"
        raise ValueError(f"{rule}; got {json.dumps(batch, default=str)}")
    return batch


class Steps(Settings):
    """The length of a run, in examples or epochs, and its batches: a schedule of pairs (fraction of the run, size)."""

    examples: Many | None = None
    epochs: Annotated[float, Field(gt=0.0, le=1e6)] | None = None
    minutes: Positive | None = None
    batch: Annotated[tuple[tuple[Fraction, Count], ...], BeforeValidator(_constant_schedule)] = ((0.0, 256),)
    retain: Whole | Literal["auto"] = 1
    accumulate: Count = 1
    epoch_steps: Count | None = None
    timeout: Annotated[float, Field(gt=0.0, le=1e6)] = 100.0
    parallel: Literal["replicate", "shard"] = "replicate"
    compile: Choice = "auto"
    instead: ClassVar = one_of("examples", "epochs")
    # a pair needs another one for its negatives; a question may have negatives of its own
    smallest_part: ClassVar[int] = 1

    def clashes(self) -> Iterable[Clash]:
        yield self.either("examples", "epochs")
        starts = [start for start, _ in self.batch]
        yield starts[:1] != [0.0], "batch", "must begin at 0.0, as in [[0.0, 256], [0.5, 4096]]"
        falling = any(late <= early for early, late in pairwise(starts))
        yield falling, "batch", "must have rising starts, as in [[0.0, 256], [0.5, 4096]]"
        least, smallest = self.smallest_part, min(size for _, size in self.batch)
        yield smallest < least, "batch", f"must be at least {least}: one pair has no negatives; got {smallest}"
        reason = f"must leave parts of {least} at least; got {self.accumulate} of a batch of {smallest}"
        yield self.accumulate > 1 and smallest < self.accumulate * least, "accumulate", reason

    def batch_at(self, fraction: float) -> int:
        """The batch size after that fraction of the run."""
        return next(size for start, size in reversed(self.batch) if start <= fraction)

    def fitted(self, pairs: int) -> Self:
        """The same with batches so small that an epoch of `pairs` has `epoch_steps` steps, but none below `LEAST`."""
        if self.epoch_steps is None:
            return self
        most = max(pairs // self.epoch_steps, LEAST, self.accumulate * self.smallest_part)
        return self.model_copy(update={"batch": tuple((start, min(size, most)) for start, size in self.batch)})

    def steps(self, count: int, examples: int) -> Iterator[int]:
        """The sizes of the first `count` steps of a run of so many examples; the last one is not cut."""
        seen = 0
        for _ in range(count):
            yield (size := self.batch_at(seen / examples))
            if (seen := seen + size) >= examples:
                break

    def length(self, pairs: int) -> int:
        """The examples of the run, for a training split of so many `pairs`."""
        return self.examples if self.examples is not None else max(1, round((self.epochs or 0.0) * pairs))


class SaveSettings(Settings):
    """Checkpoints: one every `minutes`, and one every so many `steps`; the newest `keep` stay."""

    steps: Count | None = None
    minutes: Positive = 10.0
    keep: Count = 2


class LogSettings(Settings):
    """Trackers beside the run's own folder: `tensorboard` files in it, a project of `wandb`."""

    tensorboard: Annotated[bool, needs("tensorboard", extra("log"))] = False
    wandb: Annotated[str | None, needs("wandb", extra("log"))] = None


class AnyRecipe(Settings):
    """Keys and sections of every recipe. `name` is that of the run's folder, by default the recipe file's own."""

    kind: str
    name: Annotated[str, AfterValidator(must(NAME_RULE, NAME.fullmatch))]
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    device: Annotated[str, AfterValidator(must(f"must {DEVICE_RULE}; got {{got}}", DEVICE.fullmatch))] = "auto"
    log: LogSettings = LogSettings()
    loss: LossSettings
    optim: AnyOptim = AdamWSettings()
    train: Steps
    save: SaveSettings = SaveSettings()

    def clashes(self) -> Iterable[Clash]:
        train, steps, epochs = self.train, self.optim.warmup_steps, self.optim.warmup_epochs
        if epochs is not None and train.epochs is not None:
            got = f"{epochs:g} of {train.epochs:g} epochs"
            yield epochs >= train.epochs, "optim.warmup_epochs", f"must be shorter than the run; got {got}"
        # summing the steps is slow where they are many and small, so bound them first
        if steps is not None and train.examples and steps * max(size for _, size in train.batch) >= train.examples:
            seen = sum(train.steps(steps, train.examples))
            got = f"{steps:,} steps, {seen:,} of {train.examples:,} examples"
            yield seen >= train.examples, "optim.warmup_steps", f"must be shorter than the run; got {got}"

    def training_clashes(self) -> Iterable[Clash]:
        cpu_only = torch_is_cpu_only()
        installed = "the torch that is installed is for CPUs alone"
        reason = f'must be "auto" or "cpu": {installed}; got "{self.device}"'
        yield self.device.startswith("cuda") and cpu_only, "device", reason
        if self.loss.backend == "triton" and "TRITON_INTERPRET" not in os.environ:
            rule = 'must be "auto", "eager" or "dense"'
            yield self.device == "cpu", "loss.backend", f'{rule} with device = "cpu"; got "triton"'
            yield cpu_only, "loss.backend", f'{rule}: {installed}; got "triton"'
            yield not_installed("triton", "triton", "loss.backend")

    def too_small_queue(self, keys: int) -> Clash:
        """The clash of a queue that is too small for the keys of a step, `keys` for each example."""
        size, largest = getattr(self.loss, "queue", 0), keys * max(size for _, size in self.train.batch)
        reason = f"must have room for the keys of a step, {largest} at most; got {size}"
        return 0 < size < largest, "loss.queue", reason

    def too_few_tokens(self, side: str, length: str = "length", noun: str = "text") -> Clash:
        """The clash of a limit of tokens that is too low for one text; `length` is the key of a text's tokens."""
        recipe: Any = self
        tokens, least = recipe.train.sub_batch.tokens(side), getattr(recipe.model.tokenizer, length)
        reason = f"must be at least model.tokenizer.{length}, the tokens of one {noun}; got {tokens} and {least}"
        return tokens is not None and tokens < least, f"train.sub_batch.{side}_tokens", reason
