"""`python -m contrastile train recipes/glyphs.toml`, and the command `contrastile`: where both begin.

Before everything else: Ctrl-C is looked after from here on, also while libraries are still being loaded.
"""

import io
import os
import signal
import sys
from types import FrameType

STOPPED = "stopped\n"


def command() -> int:
    """Run the command line of this process; the exit code."""
    # where somebody ignores it, as `nohup` and scripts do for what runs behind them, it stays so
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # its encoding may lack the bars and arrows that are printed
        sys.stdout.reconfigure(errors="replace")
    try:
        from contrastile.cli.main import main

        return main()
    except KeyboardInterrupt:
        # before or behind a verb, which has its own way to end
        sys.stderr.write(STOPPED)
        return 128 + signal.SIGINT


def _stop(number: int, frame: FrameType | None) -> None:
    """Python's own way, but for a process that is loading a module: it ends here.

    An import has nothing to put away, and libraries in C lose an interrupt, or make another error of it.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os.write(2, STOPPED.encode())
            os._exit(128 + number)
        frame = frame.f_back
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(command())
