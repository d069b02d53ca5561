"""The form of every error that a user can mend, and the log of the package.

The lowest file of the package. It imports nothing, not even torch, so that the command line can refuse an argument
before torch is loaded. Checks of tensors are in `engine/arguments.py`.
"""

import errno
import logging
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from numbers import Real
from pathlib import Path
from typing import Any

logger = logging.getLogger("contrastile")

# the folder in which the package lies
ROOT = Path(__file__).parent.parent

# rule and remedy of label smoothing
SMOOTHING = "be at least 0 and below 1", "0.1 is usual."

# error numbers of a full disk
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

# keywords of other libraries, and their place here
_RANKS = "Leave it out: a loss meets all ranks by itself, with gradients to all of them."
_SCALE = "Pass the scale, 1 / temperature, in the call."
_NEGATIVES = "Pass `negatives` in the call: [H, D] for all queries, [N, H, D] for each query's own."
_UNIT = "Leave it out, and pass torch.nn.functional.normalize(x, dim=-1)."
_MASK = "Pass token vectors and their mask as a pair, (vectors, mask)."
_SUB_BATCH = "Encoders run in sub-batches: pass sub_batch to contrastile.encode."
FOREIGN_KEYWORDS = dict.fromkeys(
    ("local_loss", "gather_with_grad", "cache_labels", "rank", "world_size", "use_horovod",
     "gather_across_devices", "gather_distributed", "bidirectional"), _RANKS,
) | dict.fromkeys(("mask", "query_mask", "key_mask", "attention_mask"), _MASK) | {
    "temperature": _SCALE, "base_temperature": _SCALE, "scale": "Pass it in the call.",
    "logit_scale": "Pass it in the call, to contrast as `scale`.",
    "logit_bias": "Pass it in the call, to contrast as `bias`.",
    "labels": "Pass them in the call, to contrast as `query_labels` and `key_labels`.",
    "ids": "Pass them in the call, to contrast as `query_ids` and `key_ids`.",
    "scorer": "Pass it to contrast, the function under every loss.",
    "normalize": _UNIT, "normalize_embeddings": _UNIT,
    "contrast_mode": "Leave it out: every view is an anchor.",
    "batch_size": "Leave it out of a loss, which takes any number of rows; pass sub_batch to encode.",
    "hard_negatives": _NEGATIVES, "negative_keys": _NEGATIVES, "negative_mode": _NEGATIVES,
    "dist_impl": 'Pass exchange="gather" or "ring", or leave it out.',
    "mini_batch_size": _SUB_BATCH, "micro_batch_size": _SUB_BATCH, "chunk_size": _SUB_BATCH,
    "memory_bank_size": "Pass the keys of a KeyQueue in the call, as `negatives`.",
}  # fmt: skip


def invalid(name: str, rule: str, got: object, remedy: str) -> ValueError:
    """The error of an argument: the rule, what was got, and the remedy.

    >>> str(invalid("sub_batch", "be at least 1", 0, "Pass the number of examples that fit at once."))
    '`sub_batch` must be at least 1; got 0. Pass the number of examples that fit at once.'
    """
    return ValueError(f"`{name}` must {rule}; got {got}. {remedy}")


def unknown_keyword(
    unknown: Mapping[str, Any], known: Iterable[str], what: str = "options", remedy: str = ""
) -> ValueError:
    """The error of keywords that a call does not know; remedy: before those of the table."""
    known, name = list(dict.fromkeys(known)), next(iter(unknown))
    near = get_close_matches(name, known, n=1, cutoff=0.75)
    nearest = f"Did you mean {near[0]}?" if near else "Check the spelling."
    # a tensor by its shape
    words = [f"a tensor {list(x.shape)}" if hasattr(x, "shape") else f"{x!r:.20}" for x in unknown.values()]
    got = ", ".join(map("=".join, zip(unknown, words, strict=True)))
    return invalid(name, f"be one of the {what} {', '.join(known)}", got, remedy or FOREIGN_KEYWORDS.get(name, nearest))


def with_names(error: ValueError, names: Mapping[str, str]) -> ValueError:
    """An error with a caller's names of arguments; names: by those that it has. One without them stays as it is.

    Made of operations that torch.compile traces.
    """
    if type(error) is not ValueError or len(error.args) != 1:
        return error
    words = str(error.args[0])
    for name, own in names.items():
        words = words.replace(f"`{name}`", f"`{own}`")
    return error if words == error.args[0] else ValueError(words)


def extra(name: str, root: Path = ROOT) -> str:
    """The argument of pip for an extra of this package: in a clone, which pip finds without an index, the clone itself.

    root: the folder in which the package lies.
    """
    try:
        clone = 'name = "contrastile"' in (root / "pyproject.toml").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        clone = False
    return f"'.[{name}]'" if clone else f'"contrastile[{name}]"'


@contextmanager
def renamed(**names: str) -> Iterator[None]:
    """Raise errors with a caller's names of arguments."""
    try:
        yield
    except ValueError as error:
        raise with_names(error, names) from None


def one_of(name: str, value: object, known: tuple[str, ...], remedy: str) -> None:
    """Raise ValueError unless the value is one of the known words."""
    if value not in known:
        raise invalid(name, f"be one of {', '.join(known)}", repr(value), remedy)


def number(name: str, value: Any, holds: Callable[[float], bool], rule: str, remedy: str) -> None:
    """A finite number for which this holds."""
    real = isinstance(value, Real) and not isinstance(value, bool)
    if hasattr(value, "requires_grad"):
        # a tensor, whose value need not be the mistake
        raise invalid(name, "be a number", type(value).__name__, remedy)
    if not real or not math.isfinite(value) or not holds(value):
        raise invalid(name, rule, value if real else repr(value), remedy)


def truth_value(name: str, value: object) -> None:
    """Raise ValueError for anything but True and False: the word "no" would count as true."""
    if not isinstance(value, bool):
        raise invalid(name, "be True or False", repr(value), "Pass one of these, without quotes.")


def whole_number(name: str, value: Any, least: int, remedy: str, *, rule: str = "", most: int | None = None) -> int:
    """A whole number of any library as an int: all that `operator.index` takes, except truth values.

    rule: in place of "a whole number of at least `least`".
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    # torch's truth values have an index too; torch.compile finds no attribute that a plain int may lack
    truth = isinstance(value, bool) or (type(value) is not int and str(getattr(value, "dtype", "")).endswith("bool"))
    if number is None or truth or number < least or (most is not None and number > most):
        got = repr(value) if number is None or truth else number
        raise invalid(name, rule or f"be a whole number of at least {least}", got, remedy)
    return number


# characters that control a terminal: all control characters but the tab, marks of text direction, and lone surrogates
CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(line: str) -> str:
    """A line with its control characters as escapes, so that text from a file cannot direct the terminal.

    >>> printable("red\\x1b[2J fox")
    'red\\\\x1b[2J fox'
    """
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), line)


@contextmanager
def written_to(target: object) -> Iterator[None]:
    """Name the file or folder that had no room: an error of an open file does not name it."""
    try:
        yield
    except OSError as error:
        # numpy has words of its own, and no number
        if error.errno not in FULL and " requested and " not in str(error):
            raise
        named = OSError(f"{target} could not be written ({error.strerror or error}); free the disk and begin again")
        named.errno = error.errno
        raise named from error
