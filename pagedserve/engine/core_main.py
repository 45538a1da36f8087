"""The entry point of the core's process: `python -m pagedserve.engine.core_main FD LEVEL FORMAT` (FD: a socket)."""

from __future__ import annotations

import gc
import os
import sys
from importlib import import_module

# With the extension modules that the core needs beside torch: these load one after another, so they come first.
_WITH_EXTENSIONS = (
    *("array", "fcntl", "hashlib", "heapq", "json", "logging", "mmap", "queue", "selectors", "subprocess", "tempfile"),
    *("uuid", "zipfile", "msgspec", "numpy"),
)
# Loads torch's library in a thread. By name, as the engine reaches all of the data plane.
_TORCH_AHEAD = "pagedserve.kernels.torch_ahead"


def main() -> int:
    """Runs the core until its parent is gone; the exit code."""
    # Imports make some 200,000 objects that stay: the collector would walk them again and again, a fifth of the time.
    # It is switched on when the model is loaded.
    gc.disable()
    for name in _WITH_EXTENSIONS:
        import_module(name)
    import_module(_TORCH_AHEAD).begin()
    from pagedserve.engine import core_process

    return core_process.main()


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # All that is left is memory; taking torch apart in order would cost most of a second.
    os._exit(code)
