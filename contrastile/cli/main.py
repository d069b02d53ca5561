"""The command `contrastile`: reads its arguments, calls a verb, turns errors into one line and an exit code.

The outermost layer of the house. Nothing heavy is imported until a verb runs. Exit codes: 0 done, 1 the machine failed
(a full disk, no memory), 2 the user is asked to change something, 130 stopped by Ctrl-C (143 by SIGTERM), 141 nobody
reads on.
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

# what installs a module that the main job does without
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
    """Tells a mistake in one line, and takes no option by half its name; the verbs' parsers are of this class too."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how, allow_abbrev=False)
        # the parser that read the last word: its help is the one to look at
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
        # what was asked twice to stop says by which signal
        return _say("stopped", 128 + next(iter(stop.args), signal.SIGINT))
    except ModuleNotFoundError as error:
        if chosen.traceback or (error.name or "").startswith("contrastile"):
            raise
        package = PACKAGES.get(error.name or "", '"contrastile[train]"')
        return _say(f"`{error.name}` is not installed; run: pip install {package}", 2)
    except (ValueError, FileNotFoundError) as error:
        if chosen.traceback:
            raise
        return _say(str(error), 2)
    except BrokenPipeError as error:
        if _nobody_reads():
            return 141
        return _say(str(error), 1)
    except (OSError, FloatingPointError) as error:
        if chosen.traceback:
            raise
        return _say(str(error), 1)
    except (RuntimeError, MemoryError) as error:
        if chosen.traceback or not _of_memory(error):
            raise
        return _say(f"memory ran out: {' '.join(str(error).split())}", 1)


def _parsed(parser: Parser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """As `parse_args`, with key=value behind options too, where argparse takes no more; no words get the help."""
    if not (sys.argv[1:] if arguments is None else arguments):
        parser.print_help(sys.stderr)
        parser.exit(2)
    chosen, more = parser.parse_known_args(arguments)
    strange = [word for word in more if word.startswith("-") or "=" not in word or not hasattr(chosen, "overrides")]
    if strange:
        chosen.parser.error(f"unrecognized arguments: {' '.join(strange)}")
    if more:
        chosen.overrides = [*chosen.overrides, *more]
    return chosen


def _of_memory(error: RuntimeError | MemoryError) -> bool:
    """Whether there was no room, on the host or on a GPU: torch has an error of its own for the latter alone."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return bool(kinds & {"MemoryError", "OutOfMemoryError"}) or "can't allocate memory" in str(error)


def _nobody_reads() -> bool:
    """Whether whoever read the output has gone, as `head` does; then nothing more is said to it."""
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


def _say(sentence: str, code: int) -> int:
    print(sentence, file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
