"""Torch's largest library, loaded by a thread while Python modules are imported.

Importing torch begins with it and holds the interpreter's lock meanwhile, for a fifth of the whole import. Loaded
before, under the same flags, it is found in place. Whatever goes wrong here is left to the import, which tells it.
Only torch for CPUs: that for GPUs looks for libraries of other packages on its own ways.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import threading
from pathlib import Path

# As torch's __init__ loads them: what the others need is made known to all, then the library without Python in it.
_LIBRARIES = (("libtorch_global_deps.so", os.RTLD_NOW | os.RTLD_GLOBAL), ("libtorch_cpu.so", os.RTLD_NOW))


def begin() -> threading.Thread | None:
    """Starts to load them; None where there is nothing to load so.

    Until it is done, loading an extension module waits for it, because the system loads one library at a time.
    """
    if sys.platform != "linux" or "torch" in sys.modules:
        return None
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "lib"
    if any((folder / name).exists() for name in ("libtorch_cuda.so", "libtorch_hip.so", "libtorch_xpu.so")):
        return None
    try:
        # Not ctypes.CDLL: some versions of Python keep their lock while that one loads.
        dlopen = ctypes.CDLL(None).dlopen
    except AttributeError:
        return None
    dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p

    def load() -> None:
        for name, flags in _LIBRARIES:
            if not dlopen(os.fsencode(folder / name), flags):
                return

    thread = threading.Thread(target=load, name="torch-ahead", daemon=True)
    thread.start()
    return thread
