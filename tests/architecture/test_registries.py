"""Every registry entry imports, and the public names are those that are documented."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest

import pagedserve
from pagedserve.registry import Registry, load

ROOT = Path(__file__).parents[2]


def registries() -> list[tuple[str, Registry]]:
    found = []
    for path in sorted((ROOT / "pagedserve").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            target = node.target if isinstance(node, ast.AnnAssign) else None
            target = node.targets[0] if isinstance(node, ast.Assign) else target
            call = getattr(node, "value", None)
            func = call.func if isinstance(call, ast.Call) else None
            func = func.value if isinstance(func, ast.Subscript) else func
            if isinstance(target, ast.Name) and isinstance(func, ast.Name) and func.id == "Registry":
                parts = path.relative_to(ROOT).with_suffix("").parts
                module = import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
                found.append((f"{module.__name__}.{target.id}", getattr(module, target.id)))
    return found


def test_there_are_registries() -> None:
    kinds = {registry.kind for _, registry in registries()}
    assert {"architecture", "attention backend"} <= kinds


@pytest.mark.parametrize(("name", "registry"), registries(), ids=lambda value: value if isinstance(value, str) else "")
def test_every_entry_imports(name: str, registry: Registry) -> None:
    for entry, target in registry.items():
        assert load(target) is not None, f"{name}[{entry}]"


def test_public_names_resolve() -> None:
    for name in pagedserve.__all__:
        assert getattr(pagedserve, name) is not None
    with pytest.raises(AttributeError):
        _ = pagedserve.nothing_of_that_name


def test_commands_and_benches_import() -> None:
    from pagedserve.cli import COMMANDS
    from pagedserve.cli.bench import BENCHES

    for module_name, _ in (*COMMANDS.values(), *BENCHES.values()):
        module = import_module(module_name)
        assert callable(module.add_arguments)
        assert callable(module.run)
