"""The entry point of the core's process: `python -m pagedserve.engine.core_main FD LEVEL FORMAT` (FD: a socket)."""

from __future__ import annotations

import gc
import os
import sys


def main() -> int:
    """Runs the core until its parent is gone; the exit code."""
    # Imports make some 200,000 objects that stay: the collector would walk them again and again, a fifth of the time.
    # It is switched on when the model is loaded.
    gc.disable()
    from pagedserve.engine import core_process

    return core_process.main()


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # All that is left is memory; taking torch apart in order would cost most of a second.
    os._exit(code)
