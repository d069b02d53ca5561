"""Tokenizers: of words or subwords, trained on the run's own texts, or any from a local folder.

Below the text towers. A trained tokenizer is saved as tokenizer.json, the format of the library `tokenizers`.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

import torch
from torch import Tensor

from contrastile._errors import invalid, whole_number
from contrastile.models.remote_code import refuse_remote_code

PAD, UNKNOWN = "[PAD]", "[UNK]"
# the token that fills up the queries of a late retriever
MASK = "[MASK]"
# the first and last token of a text for CLIP
CLIP_ENDS = ("<start_of_text>", "<end_of_text>")
# above it, a tokenizer's own length stands for no limit
MOST_TOKENS = 100_000


class Tokenizer(Protocol):
    """The interface that text towers and training need; see `WordTokenizer`."""

    length: int
    pad: int
    vocabulary_size: int
    mask: int

    def tokenise(self, texts: Sequence[str], length: int | None = None) -> dict[str, Tensor]: ...
    def token_id(self, token: str) -> int | None: ...
    def tokens(self, ids: Sequence[int]) -> list[str]: ...
    def save(self, folder: Path) -> None: ...


class WordTokenizer:
    """A tokenizer of the library `tokenizers`: words, single digits and punctuation marks, regardless of case.

    A tokenizer of the kind "words" makes `[UNK]` of an unknown word. The kind "bpe" splits it into subwords, and
    `snake_case` into its parts. `pad`, `mask`: the numbers of these tokens; without a mask token, `mask` is `pad`.
    """

    def __init__(self, serialised: str, *, length: int) -> None:
        from tokenizers import Tokenizer as Engine

        remedy, rule = "Captions of a few words need about 16.", "be at least 1 token"
        self.length = length = whole_number("length", length, 1, remedy, rule=rule)
        self._engine = Engine.from_str(serialised)
        self._engine.enable_truncation(length)
        padding = self._engine.padding or {}
        pad = padding.get("pad_id", self._engine.get_vocab().get(PAD))
        if pad is None:
            raise invalid("tokenizer", "have a padding token", "none", f"Add {PAD} to its words, or turn padding on.")
        self.pad, self.vocabulary_size = int(pad), int(self._engine.get_vocab_size())
        mask = self.token_id(MASK)
        self.mask = self.pad if mask is None else mask
        self._engine.enable_padding(length=length, pad_id=self.pad, pad_token=padding.get("pad_token", PAD))

    def tokenise(self, texts: Sequence[str], length: int | None = None) -> dict[str, Tensor]:
        """`input_ids` and `attention_mask`, int64 `[B, length]`, by default its own; longer texts are truncated."""
        encoded = self._engine.encode_batch(list(texts))
        rows = {
            "input_ids": [text.ids for text in encoded],
            "attention_mask": [text.attention_mask for text in encoded],
        }
        return {name: torch.tensor(ids).view(len(encoded), self.length)[:, :length] for name, ids in rows.items()}

    def token_id(self, token: str) -> int | None:
        return self._engine.token_to_id(token)

    def tokens(self, ids: Sequence[int]) -> list[str]:
        return [self._engine.id_to_token(number) or UNKNOWN for number in ids]

    def save(self, folder: Path) -> None:
        self._engine.save(str(folder / "tokenizer.json"))


class FolderTokenizer:
    def __init__(self, folder: Path, *, length: int) -> None:
        from transformers import AutoTokenizer
        from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

        kind = refuse_remote_code(folder).get("tokenizer_class")
        if kind is not None and tokenizer_class_from_name(kind) is None:
            remedy = "Save the tokenizer with one of its classes."
            raise invalid("tokenizer_class", "be a class of transformers", f'"{kind}" in "{folder}"', remedy)
        self.length = length
        # a call sets the engine's padding and truncation, so calls of several threads must not overlap
        self._lock = Lock()
        self._engine = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if self._engine.pad_token_id is None:
            raise invalid("tokenizer", "have a padding token", folder, "Set one and save the tokenizer again.")
        self.pad, self.vocabulary_size = int(self._engine.pad_token_id), len(self._engine)
        mask = self._engine.mask_token_id
        self.mask = self.pad if mask is None else int(mask)

    def tokenise(self, texts: Sequence[str], length: int | None = None) -> dict[str, Tensor]:
        """A model whose tokenizer returns no mask (SigLIP) was trained on its padding, so the mask is all ones."""
        options = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
        with self._lock:
            encoded = self._engine(list(texts), max_length=length or self.length, **options)
        ids, mask = encoded["input_ids"], encoded.get("attention_mask")
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids) if mask is None else mask}

    def token_id(self, token: str) -> int | None:
        return self._engine.get_vocab().get(token)

    def tokens(self, ids: Sequence[int]) -> list[str]:
        # a number may have no token
        return [token or UNKNOWN for token in self._engine.convert_ids_to_tokens(list(ids))]

    def save(self, folder: Path) -> None:
        self._engine.model_max_length = self.length
        self._engine.save_pretrained(folder)


def train_tokenizer(
    texts: Iterable[str], *, kind: str = "words", size: int = 8000, length: int = 16, special: Sequence[str] = ()
) -> WordTokenizer:
    """A tokenizer of the `size` most frequent words or subwords of `texts`, for texts of up to `length` tokens.

    special: further tokens that stand for no word, such as markers and a mask.

    >>> tokenizer = train_tokenizer(["LATIN SMALL LETTER A", "LATIN SMALL LETTER B"], length=5)
    >>> tokenizer.tokenise(["LATIN LETTER Z"])["attention_mask"]
    tensor([[1, 1, 1, 0, 0]])
    """
    remedy = "Two of them are for padding and for what is unknown."
    size = whole_number("size", size, 3, remedy, rule="be at least 3 words")

    from tokenizers import Tokenizer as Engine
    from tokenizers import models, normalizers, pre_tokenizers, trainers

    options: dict[str, Any] = {"vocab_size": size, "special_tokens": [PAD, UNKNOWN, *special], "show_progress": False}
    digits = pre_tokenizers.Digits(individual_digits=True)
    if kind == "words":
        engine = Engine(models.WordLevel(unk_token=UNKNOWN))
        trainer: Any = trainers.WordLevelTrainer(**options)
        splits = [pre_tokenizers.Whitespace(), digits]
    else:
        engine = Engine(models.BPE(unk_token=UNKNOWN))
        trainer = trainers.BpeTrainer(min_frequency=2, **options)
        # Punctuation isolates the underscore too, so that names in code are split into their parts
        splits = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation(), digits]
    engine.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    engine.pre_tokenizer = pre_tokenizers.Sequence(splits)
    engine.train_from_iterator(texts, trainer)
    return WordTokenizer(str(engine.to_str()), length=length)


def bpe_as_clip(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> str:
    """A tokenizer.json that tokenises as CLIP does: lower case, bytes, these subwords, padded with token 0."""
    from tokenizers import Regex, models, normalizers, pre_tokenizers, processors
    from tokenizers import Tokenizer as Engine

    begin, end = CLIP_ENDS
    engine = Engine(models.BPE(vocab=vocabulary, merges=merges, unk_token=end, end_of_word_suffix="</w>"))
    straight = [normalizers.Replace(Regex(curly), plain) for curly, plain in (("[‘’‚‛]", "'"), ("[“”„‟]", '"'))]  # noqa: RUF001
    blanks = normalizers.Replace(Regex(r"\s+"), " ")
    engine.normalizer = normalizers.Sequence([normalizers.NFC(), *straight, blanks, normalizers.Lowercase()])
    words = Regex(r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+")
    split = pre_tokenizers.Split(words, behavior="removed", invert=True)
    engine.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    ends = [(token, vocabulary[token]) for token in CLIP_ENDS]
    engine.post_processor = processors.TemplateProcessing(single=f"{begin} $A {end}", special_tokens=ends)
    engine.enable_padding(pad_id=0, pad_token=next(token for token, number in vocabulary.items() if number == 0))
    return str(engine.to_str())


def load_tokenizer(folder: Path, *, length: int | None = None) -> Tokenizer:
    """The tokenizer of a folder, one that `save` wrote or any that transformers reads; its own `length` by default."""
    serialised, config = folder / "tokenizer.json", folder / "tokenizer_config.json"
    # the libraries raise errors of many types, tokenizers a bare Exception
    try:
        if config.is_file():
            limit = json.loads(config.read_text(encoding="utf-8")).get("model_max_length")
            return FolderTokenizer(folder, length=_checked_length(length or limit, folder))
        if not serialised.is_file():
            raise invalid("folder", "hold a tokenizer.json", folder, "Point to a run or to a saved tokenizer.")
        text = serialised.read_text(encoding="utf-8")
        limit = (json.loads(text).get("truncation") or {}).get("max_length")
        return WordTokenizer(text, length=_checked_length(length or limit, folder))
    except Exception as error:
        # the sentence of `invalid` already
        if isinstance(error, ValueError) and str(error).startswith("`"):
            raise
        got = f"{folder} ({' '.join(str(error).split()).rstrip('.') or type(error).__name__})"
        raise invalid("tokenizer", "be one that can be read", got, "Restore or replace it.") from error


def _checked_length(length: int | None, folder: Path) -> int:
    if length is None or length > MOST_TOKENS:
        raise invalid("length", f"be given for the tokenizer of {folder}", length, "It tells no limit of its own.")
    return int(length)
