"""Nothing that arrives, from a socket or a model's folder, is ever unpickled (C110)."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "pagedserve"
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "multiprocessing"}
# Calls that unpickle unless told otherwise; the project has no use for any of them.
CALLS = {"torch.load", "np.load", "numpy.load", "pandas.read_pickle", "recv_pyobj", "send_pyobj"}


def offences(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Call):
            call = ast.unparse(node.func)
            if call in CALLS or call.rpartition(".")[2] in CALLS:
                found.append(f"{path.name}:{node.lineno} calls {call}")
            continue
        else:
            continue
        found += [f"{path.name}:{node.lineno} imports {name}" for name in names if name.partition(".")[0] in MODULES]
    return found


def test_no_module_can_unpickle() -> None:  # C110
    assert [offence for path in sorted(PACKAGE.rglob("*.py")) for offence in offences(path)] == []


def test_the_search_finds_what_it_looks_for(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text("import pickle\nfrom multiprocessing.queues import Queue\ntorch.load(x)\nsocket.recv_pyobj()\n")
    assert len(offences(module)) == 4
