"""From texts to numbers: a tokenizer of words or subwords trained on the run's own texts, or one from a local folder.

Before the text tower in the flow's second box. A trained tokenizer is saved as one tokenizer.json, the format of the
library `tokenizers`, and read again from there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from threading import Lock
from typing import Protocol

import torch
from torch import Tensor

from contrastile._check import whole_number, wrong

PAD, UNKNOWN = "[PAD]", "[UNK]"
# what a text begins and ends with where it is read as CLIP does
CLIP_ENDS = ("<start_of_text>", "<end_of_text>")


class Tokenizer(Protocol):
    """What the text towers and the training need of a tokenizer."""

    length: int

    @property
    def vocabulary_size(self) -> int:
        """How many different tokens there are."""

    @property
    def pad(self) -> int:
        """The number that fills up short texts."""

    def tokenise(self, texts: Sequence[str], length: int | None = None) -> dict[str, Tensor]:
        """`input_ids` and `attention_mask`, int64 `[B, length]`, its own length by default; longer texts are cut."""

    def save(self, folder: Path) -> None:
        """Everything that `load_tokenizer` needs, into a folder."""


class WordTokenizer:
    """Words, single digits and marks, regardless of case; a word that training never saw becomes `[UNK]`.

    So BRAILLE PATTERN DOTS-12 reads `braille pattern dots - 1 2`, and a pattern never seen is made of parts that were.
    Of the kind "bpe" a word never seen is made of subwords, and `snake_case` of its parts.
    """

    def __init__(self, described: str, *, length: int) -> None:
        from tokenizers import Tokenizer as Engine

        remedy, rule = "Titles of a few words need about 16.", "be at least 1 token"
        self.length = length = whole_number("length", length, 1, remedy, rule=rule)
        self._engine = Engine.from_str(described)
        self._engine.enable_truncation(length)
        padded = self._engine.padding or {}
        pad = padded.get("pad_id", self._engine.get_vocab().get(PAD))
        if pad is None:
            raise wrong("tokenizer", "have a padding token", "none", f"Add {PAD} to its words, or turn padding on.")
        self._pad = int(pad)
        self._engine.enable_padding(length=length, pad_id=self._pad, pad_token=padded.get("pad_token", PAD))

    @property
    def vocabulary_size(self) -> int:
        """The words kept, `[PAD]` and `[UNK]` among them."""
        return int(self._engine.get_vocab_size())

    @property
    def pad(self) -> int:
        """The number of `[PAD]`."""
        return self._pad

    def tokenise(self, texts: Sequence[str], length: int | None = None) -> dict[str, Tensor]:
        """`input_ids` and `attention_mask`, int64 `[B, length]`; longer texts are cut."""
        encoded = self._engine.encode_batch(list(texts))
        ids = torch.tensor([text.ids for text in encoded]).view(len(encoded), self.length)
        mask = torch.tensor([text.attention_mask for text in encoded]).view(len(encoded), self.length)
        return {"input_ids": ids[:, :length], "attention_mask": mask[:, :length]}

    def save(self, folder: Path) -> None:
        """As tokenizer.json, its length inside."""
        self._engine.save(str(folder / "tokenizer.json"))


class FolderTokenizer:
    """Any tokenizer that transformers can read from a local folder."""

    def __init__(self, folder: Path, *, length: int) -> None:
        from transformers import AutoTokenizer

        self.length = length
        # the library sets padding and truncation anew for each call, which no other call may see
        self._alone = Lock()
        self._engine = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if self._engine.pad_token_id is None:
            raise wrong("tokenizer", "have a padding token", folder, "Set one and save the tokenizer again.")

    @property
    def vocabulary_size(self) -> int:
        """Added tokens included."""
        return len(self._engine)

    @property
    def pad(self) -> int:
        """The number of the padding token."""
        return int(self._engine.pad_token_id)

    def tokenise(self, texts: Sequence[str], length: int | None = None) -> dict[str, Tensor]:
        """`input_ids` and `attention_mask`, int64 `[B, length]`; longer texts are cut.

        A model whose tokenizer gives no mask (SigLIP) was trained to see its padding, so everything is let through.
        """
        how = {"padding": "max_length", "truncation": True, "max_length": length or self.length, "return_tensors": "pt"}
        with self._alone:
            encoded = self._engine(list(texts), **how)
        mask = encoded.get("attention_mask")
        return {
            "input_ids": encoded["input_ids"],
            "attention_mask": torch.ones_like(encoded["input_ids"]) if mask is None else mask,
        }

    def save(self, folder: Path) -> None:
        """In the library's own files, the length beside them."""
        self._engine.model_max_length = self.length
        self._engine.save_pretrained(folder)


def train_tokenizer(titles: Iterable[str], *, kind: str = "words", size: int = 8000, length: int = 16) -> WordTokenizer:
    """A tokenizer of the `size` most frequent words of `titles`, for texts of up to `length` tokens.

    >>> tokenizer = train_tokenizer(["LATIN SMALL LETTER A", "LATIN SMALL LETTER B"], length=5)
    >>> tokenizer.tokenise(["LATIN LETTER Z"])["attention_mask"]
    tensor([[1, 1, 1, 0, 0]])
    """
    if kind not in TRAINERS:
        raise wrong("kind", f"be one of {', '.join(TRAINERS)}", kind, "Or load a tokenizer from a folder.")
    remedy = "Two of them are for padding and for what is unknown."
    size = whole_number("size", size, 3, remedy, rule="be at least 3 words")
    return WordTokenizer(TRAINERS[kind](titles, size), length=length)


def _train_words(titles: Iterable[str], size: int) -> str:
    from tokenizers import Tokenizer as Engine
    from tokenizers import models, normalizers, pre_tokenizers, trainers

    engine = Engine(models.WordLevel(unk_token=UNKNOWN))
    engine.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    engine.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)]
    )
    trainer = trainers.WordLevelTrainer(vocab_size=size, special_tokens=[PAD, UNKNOWN], show_progress=False)
    engine.train_from_iterator(titles, trainer)
    return str(engine.to_str())


def _train_bpe(texts: Iterable[str], size: int) -> str:
    from tokenizers import Tokenizer as Engine
    from tokenizers import models, normalizers, pre_tokenizers, trainers

    engine = Engine(models.BPE(unk_token=UNKNOWN))
    engine.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    # marks stand alone, the underscore too, so that names in code come apart
    engine.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation(), pre_tokenizers.Digits(individual_digits=True)]
    )
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[PAD, UNKNOWN], min_frequency=2, show_progress=False)
    engine.train_from_iterator(texts, trainer)
    return str(engine.to_str())


def bpe_as_clip(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> str:
    """CLIP's way of reading, with these subwords, as tokenizer.json has it: lower case, bytes, padded with number 0."""
    from tokenizers import Regex, models, normalizers, pre_tokenizers, processors
    from tokenizers import Tokenizer as Engine

    begin, end = CLIP_ENDS
    engine = Engine(models.BPE(vocab=vocabulary, merges=merges, unk_token=end, end_of_word_suffix="</w>"))
    straight = [normalizers.Replace(Regex(curly), plain) for curly, plain in (("[‘’‚‛]", "'"), ("[“”„‟]", '"'))]  # noqa: RUF001
    blanks = normalizers.Replace(Regex(r"\s+"), " ")
    engine.normalizer = normalizers.Sequence([normalizers.NFC(), *straight, blanks, normalizers.Lowercase()])
    words = Regex(r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+")
    engine.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    ends = [(token, vocabulary[token]) for token in CLIP_ENDS]
    engine.post_processor = processors.TemplateProcessing(single=f"{begin} $A {end}", special_tokens=ends)
    engine.enable_padding(pad_id=0, pad_token=next(token for token, number in vocabulary.items() if number == 0))
    return str(engine.to_str())


TRAINERS = {"words": _train_words, "bpe": _train_bpe}


def load_tokenizer(folder: Path, *, length: int | None = None) -> Tokenizer:
    """The tokenizer of a folder: one that `save` wrote, or any that transformers can read.

    `length` may be left out where the folder's own tells it. Raises ValueError where there is none, or a damaged one.
    """
    try:
        return _loaded(folder, length)
    except ValueError as failure:
        # its own sentence; the libraries' are of other kinds
        if str(failure).startswith("`"):
            raise
        damage: Exception = failure
    # tokenizers raises nothing more special
    except Exception as failure:
        damage = failure
    said = " ".join(str(damage).split()).rstrip(".") or type(damage).__name__
    raise wrong("tokenizer", "be one that can be read", f"{folder} ({said})", "Restore or replace it.") from damage


def _loaded(folder: Path, length: int | None) -> Tokenizer:
    described = folder / "tokenizer.json"
    configured = folder / "tokenizer_config.json"
    if configured.is_file():
        told = json.loads(configured.read_text(encoding="utf-8")).get("model_max_length")
        return FolderTokenizer(folder, length=_length(length or told, folder))
    if not described.is_file():
        raise wrong("folder", "hold a tokenizer.json", folder, "Point to a run or to a saved tokenizer.")
    text = described.read_text(encoding="utf-8")
    told = (json.loads(text).get("truncation") or {}).get("max_length")
    return WordTokenizer(text, length=_length(length or told, folder))


def _length(told: int | None, folder: Path) -> int:
    """Some tokenizers tell an absurd number where they have no limit."""
    if told is None or told > 100_000:
        raise wrong("length", f"be given for the tokenizer of {folder}", told, "It tells no limit of its own.")
    return int(told)
