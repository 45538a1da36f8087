"""The layers of `pagedserve/README.md`: who may import whom, and who may touch what."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "pagedserve"

# Modules at the package root are the vocabulary: everyone may import them, they import only each other.
VOCABULARY = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}

# room -> rooms it may import besides the vocabulary and itself
ALLOWED: dict[str, set[str]] = {
    "cli": {"api", "engine", "kernels"},
    "api": {"engine"},
    "engine": {"scheduler", "kv_cache", "executor"},
    "executor": set(),
    "scheduler": {"kv_cache"},
    "kv_cache": set(),
    "worker": {"models", "layers", "attention", "quantization", "sampling", "kernels"},
    "models": {"layers", "attention", "quantization", "kernels"},
    "layers": {"attention", "quantization", "kernels"},
    "attention": {"kernels"},
    "quantization": {"kernels"},
    "sampling": {"kernels"},
    "kernels": set(),
}
CONTROL_PLANE = ("cli", "api", "engine", "executor", "scheduler", "kv_cache")
HEAVY = ("torch", "transformers", "triton")


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST, *, top_level_only: bool = False) -> list[tuple[str, int]]:
    """Every imported module with its line; imports under TYPE_CHECKING do not run and do not count."""
    found: list[tuple[str, int]] = []

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            if isinstance(child, ast.Import):
                found.extend((alias.name, child.lineno) for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module and child.level == 0:
                found.append((child.module, child.lineno))
                found.extend((f"{child.module}.{alias.name}", child.lineno) for alias in child.names)
            if not (top_level_only and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)):
                visit(child)

    visit(tree)
    return found


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_a_room_imports_only_the_rooms_below_it(path: Path) -> None:
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for module, line in imports(ast.parse(path.read_text(encoding="utf-8"))):
        parts = module.split(".")
        if parts[0] != "pagedserve" or len(parts) == 1:
            continue
        target = parts[1]
        if target in VOCABULARY or target in ("__version__", "LLM", room):
            continue
        assert room in ALLOWED, f"{name_of(path)}:{line} is vocabulary and may not import the room {target}"
        assert target in ALLOWED[room], f"{name_of(path)}:{line} imports {module}: {room} may not know {target}"


def test_every_room_has_its_layer() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and list(path.glob("*.py"))}
    assert rooms == set(ALLOWED)


def test_the_control_plane_imports_with_torch_absent() -> None:
    names = [name_of(p) for p in modules() if (r := p.relative_to(PACKAGE).parts)[0] in CONTROL_PLANE or len(r) == 1]
    program = (
        "import sys, importlib\n"
        f"for heavy in {HEAVY!r}: sys.modules[heavy] = None\n"
        f"for name in {[n for n in names if not n.endswith('__main__')]!r}: importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_only_envs_reads_the_environment() -> None:
    for path in modules():
        if path.name == "envs.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
                assert node.attr not in ("environ", "getenv"), f"{name_of(path)}:{node.lineno} reads the environment"


def test_only_the_bindings_touch_ctypes() -> None:
    users = {name_of(p) for p in modules() for m, _ in imports(ast.parse(p.read_text("utf-8"))) if m == "ctypes"}
    assert users == {f"pagedserve.kernels.{name}" for name in ("native", "native_cuda", "torch_ahead")}


def test_no_module_is_a_drawer_for_anything() -> None:
    drawers = [
        name_of(p) for p in modules() if {"utils", "util", "misc", "common_utils"} & set(p.with_suffix("").parts)
    ]
    assert drawers == []
