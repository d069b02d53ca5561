"""The command `contrastile`: reads its arguments, calls a verb, turns errors into one line and an exit code.

The outermost layer. Nothing heavy is imported until a verb runs. Exit codes: 0 done, 1 the machine failed (a full disk,
no memory), 2 the user must change something, 130 stopped by Ctrl-C (143 by SIGTERM), 141 the reader of the output has
gone.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from contrastile import __version__
from contrastile.cli import bench, compare, doctor, encode, evaluate, search, train

# arguments of pip for modules outside "contrastile[train]"
PACKAGES = {
    "bm25s": '"contrastile[search]"',
    "regex": '"contrastile[search]"',
    "pyarrow": '"contrastile[data]"',
    "faiss": "faiss-cpu",
    "peft": "peft",
    "tensorboard": '"contrastile[log]"',
    "wandb": '"contrastile[log]"',
    "timm": "timm",
    "open_clip": "open_clip_torch",
    "torchvision": "torchvision",
}
VERBS = (train, evaluate, encode, search, compare, bench, doctor)


class Parser(argparse.ArgumentParser):
    """A parser with one-line errors and without abbreviated options; the verbs' parsers are of this class too."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)
        # the innermost parser, whose help explains the arguments
        self.set_defaults(parser=self)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}. See: {self.prog} --help\n")


def build_parser() -> Parser:
    """The parser with every verb's own part."""
    parser = Parser(prog="contrastile", description="Contrastive training with batches of any size.")
    parser.add_argument("--version", action="version", version=f"contrastile {__version__}")
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for verb in VERBS:
        verb.add_to(verbs)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    chosen = _parsed(build_parser(), arguments)
    try:
        code = int(chosen.verb(chosen))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt as stop:
        # a second signal is raised with its number
        return _fail("stopped", 128 + next(iter(stop.args), signal.SIGINT))
    except ModuleNotFoundError as error:
        if chosen.traceback or (error.name or "").startswith("contrastile"):
            raise
        package = PACKAGES.get(error.name or "", '"contrastile[train]"')
        return _fail(f"`{error.name}` is not installed; run: pip install {package}", 2)
    except (ValueError, FileNotFoundError) as error:
        if chosen.traceback:
            raise
        return _fail(str(error), 2)
    except BrokenPipeError as error:
        if _reader_has_gone():
            return 141
        return _fail(str(error), 1)
    except (OSError, FloatingPointError) as error:
        if chosen.traceback:
            raise
        return _fail(str(error), 1)
    except (RuntimeError, MemoryError) as error:
        if chosen.traceback or not _is_out_of_memory(error):
            raise
        return _fail(f"memory ran out: {' '.join(str(error).split())}", 1)


def _parsed(parser: Parser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse like `parse_args`, but take key=value after options too; without arguments print the help."""
    if not (sys.argv[1:] if arguments is None else arguments):
        parser.print_help(sys.stderr)
        parser.exit(2)
    chosen, more = parser.parse_known_args(arguments)
    unknown = [word for word in more if word.startswith("-") or "=" not in word or not hasattr(chosen, "overrides")]
    if unknown:
        chosen.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if more:
        chosen.overrides = [*chosen.overrides, *more]
    return chosen


def _is_out_of_memory(error: RuntimeError | MemoryError) -> bool:
    """True where memory ran out, on the host or on a GPU; torch has its own class of error for the GPU only."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return bool(kinds & {"MemoryError", "OutOfMemoryError"}) or "can't allocate memory" in str(error)


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
    os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return True


def _fail(sentence: str, code: int) -> int:
    """Print the sentence; the exit code."""
    print(sentence, file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
