"""The command `contrastile`: reads its arguments, calls a verb, turns errors into one line and an exit code.

Nothing heavy is imported until a verb runs. Exit codes: 0 done, 1 the machine failed (a full disk, no memory), 2 the
user must change something, 130 stopped by Ctrl-C (143 by SIGTERM), 141 the reader of the output has gone.
"""

import argparse
import os
import re
import select
import signal
import sys
import textwrap
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from itertools import chain
from typing import Any, NoReturn

from contrastile import __version__
from contrastile._errors import extra, printable, written_to
from contrastile.cli import bench, compare, doctor, encode, evaluate, export, plan, search, train
from contrastile.cli.options import flag
from contrastile.train.folder import recipe_names

# arguments of pip for modules outside the extra `train`
PACKAGES = {
    **dict.fromkeys(("bm25s", "regex"), extra("search")),
    **dict.fromkeys(("tensorboard", "wandb"), extra("log")),
    **{name: name for name in ("peft", "timm", "torchvision")},
    "pyarrow": extra("data"),
    "faiss": "faiss-cpu",
    "open_clip": "open_clip_torch",
    "sentence_transformers": "sentence-transformers",
}
# arguments that replace the texts of a recipe's `data.source`, by the names that a user types
SOURCES = {"--texts": "texts", "corpus": "corpus"}
# other keys of a recipe's section `data`
FILES = ("corpus", "test", "cache")
VERBS = {"Train": (plan, train, compare), "Measure": (evaluate, bench, doctor), "Search": (encode, search, export)}


class Parser(argparse.ArgumentParser):
    """A parser with one-line errors and without abbreviated options; the verbs' parsers are of this class too."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)
        # the innermost parser, whose help explains the arguments
        self.set_defaults(parser=self)

    def error(self, message: str) -> NoReturn:
        # argparse itself suggests names from Python 3.14 on
        if choice := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
            message += _meant(choice[1], re.findall(r"[\w-]+", choice[2]))
        self.exit(2, f"{self.prog}: {message}. See: {self.prog} --help\n")


class Page(Parser):
    """The command's own parser, whose help is a page: the verbs in groups, with one example each."""

    def format_help(self) -> str:
        lines = ["Contrastive training with batches of any size.", "", "usage: contrastile VERB [...]"]
        for group, verbs in VERBS.items():
            lines += ["", group]
            for verb in verbs:
                name = verb.__name__.rpartition(".")[2]
                lines += [f"  {name:<10}{verb.SUMMARY}", f"{'':12}{verb.EXAMPLE}"]
        recipes = textwrap.fill(", ".join(recipe_names()), 78, initial_indent="  ", subsequent_indent="  ")
        lines += ["", "Recipes of the package, known by these names; your own are TOML files", recipes]
        lines += ["", "contrastile VERB --help lists a verb's options; contrastile --version prints the version,"]
        return "\n".join([*lines, "contrastile --traceback VERB ... shows where an error came from.", ""])


def build_parser() -> Page:
    parser = Page(prog="contrastile", description="Contrastive training with batches of any size.")
    parser.add_argument("--version", action="version", version=f"contrastile {__version__}")
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True, parser_class=Parser)
    for verb in chain(*VERBS.values()):
        verb_parser = verbs.add_parser(verb.__name__.rpartition(".")[2], help=verb.SUMMARY)
        # a verb with sub-verbs has no `run`; they set their own
        verb_parser.set_defaults(verb=getattr(verb, "run", None))
        verb.add_to(verb_parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parsed(build_parser(), arguments)
    try:
        code = int(options.verb(options))
        with written_to("the output"):
            _flush()
        return code
    except KeyboardInterrupt as stop:
        # a second signal is raised with its number
        sentence, code = "stopped", 128 + next(iter(stop.args), signal.SIGINT)
    except BrokenPipeError as error:
        if _reader_has_gone():
            return 141
        sentence, code = str(error), 1
    except Exception as error:
        sentence, code = _explained(error)
        if options.traceback or not code:
            raise
        sentence = _as_typed(sentence, options)
    # names from files may be part of it
    print("\n".join(map(printable, sentence.split("\n"))), file=sys.stderr)
    try:
        _flush()
    except OSError:
        # Python would try again at its end, and exit with a code of its own
        _to_nowhere(sys.stdout.fileno())
    return code


def _flush() -> None:
    """Write all printed text; a closed output, for which `sys.stdout` is None, has none."""
    print(end="", flush=True)


def _to_nowhere(output: int) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), output)


def _explained(error: Exception) -> tuple[str, int]:
    """One line for an error that a user or the machine caused, and the exit code; 0 for any other error."""
    if isinstance(error, ModuleNotFoundError):
        package = PACKAGES.get(error.name or "", extra("train"))
        ours = (error.name or "").startswith("contrastile")
        return f"`{error.name}` is not installed; run: pip install {package}", 0 if ours else 2
    if isinstance(error, ValueError | FileNotFoundError):
        return str(error), 2
    if isinstance(error, OSError | FloatingPointError):
        return str(error), 1
    # torch has a class of its own for a GPU without memory, and none for the host
    classes = {base.__name__ for base in type(error).__mro__}
    full = bool(classes & {"MemoryError", "OutOfMemoryError"}) or "can't allocate memory" in str(error)
    return f"memory ran out: {' '.join(str(error).split())}", int(full)


def _as_typed(sentence: str, options: argparse.Namespace) -> str:
    """The sentence with its first name as the user typed it: `--index` for `index`, `--texts` for `source`."""
    opening = re.match(r"`(\w+)` must ", sentence)
    if opening is None:
        return sentence
    name = opening[1]
    typed = flag(name) if flag(name) in re.findall(r"--[\w-]+", options.parser.format_usage()) else name
    if name == "source":
        sources = (word for word, key in SOURCES.items() if getattr(options, key, None) is not None)
        typed = next(sources, "data.source")
    elif name in FILES and hasattr(options, "overrides"):
        typed = f"data.{name}"
    return sentence.replace(name, typed, 1)


def _parsed(parser: Parser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse like `parse_args`, but take overrides, and an optional argument, after options too.

    Without arguments print the help.
    """
    if not (sys.argv[1:] if arguments is None else arguments):
        parser.print_help(sys.stderr)
        parser.exit(2)
    options, more = parser.parse_known_args(arguments)
    usage = options.parser.format_usage()
    left_out = [name for name, value in vars(options).items() if value is None and f"[{name}]" in usage]
    if left_out and more and not more[0].startswith("-"):
        setattr(options, left_out[0], more.pop(0))
    unknown = [word for word in more if word.startswith("-") or "=" not in word or not hasattr(options, "overrides")]
    if unknown:
        hint = _hint(unknown[0], usage, has_keys=hasattr(options, "overrides"))
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if more:
        options.overrides = [*options.overrides, *more]
    return options


def _hint(word: str, usage: str, *, has_keys: bool) -> str:
    """Advice on a word that a verb does not know, or nothing. has_keys: the verb takes keys of a recipe."""
    if not word.startswith("--"):
        return " (put a question of several words into quotes)" if "[question]" in usage else ""
    of_keys = " (keys of the recipe are written without dashes, such as train.batch=64)" if has_keys else ""
    return _meant(word, re.findall(r"--[\w-]+", usage)) or of_keys


def _meant(word: str, known: Iterable[str]) -> str:
    """The known word that is most like a misspelt one, as a question; nothing if none is."""
    near = get_close_matches(word, list(known), n=1, cutoff=0.7)
    return f" (did you mean {near[0]}?)" if near else ""


def _reader_has_gone() -> bool:
    """True where the process behind the output pipe has ended, as `head` does; further output then goes nowhere."""
    try:
        output = sys.stdout.fileno()
    except (OSError, ValueError):
        return False
    poll = select.poll()
    poll.register(output, 0)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    _to_nowhere(output)
    return True
