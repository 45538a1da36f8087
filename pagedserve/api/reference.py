"""The README's reference of the HTTP API, made from the code: `python -m pagedserve.api.reference README.md`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pagedserve.api.app import build_app
from pagedserve.api.protocol.common import HARMLESS_FIELDS, UNSUPPORTED_FIELDS
from pagedserve.api.state import ApiState
from pagedserve.config import ServerConfig
from pagedserve.metrics import EngineMetrics

BEGIN = "<!-- made by `python -m pagedserve.api.reference README.md` -->\n"
END = "<!-- end of what is made -->\n"


def render() -> str:
    """A row an endpoint, with the fields of its body; required ones are bold."""
    document = build_app(ApiState(ServerConfig(), ("model",), EngineMetrics("model"))).openapi()
    rows = [
        f"| `{method.upper()} {path}` | {operation['description'].splitlines()[0]} | {_fields(document, operation)} |"
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]
    table = "\n".join(["| endpoint | | fields of the body |", "|---|---|---|", *rows])
    refused, harmless = _names(UNSUPPORTED_FIELDS), _names(HARMLESS_FIELDS - set(UNSUPPORTED_FIELDS))
    return (
        f"{table}\n\n"
        f"Where an endpoint's row does not list them, these are a 400, unless they ask for nothing: {refused}.\n\n"
        f"Accepted, and without effect on an answer: {harmless}. All other fields are named in the header "
        "`X-Pagedserve-Warning`, or a 400 with `--strict`.\n"
    )


def updated(readme: str) -> str:
    """`readme` with the reference as it is now."""
    before, _, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError("the README has no place for the reference")
    return f"{before}{BEGIN}{render()}{END}{after}"


def _fields(document: dict[str, Any], operation: dict[str, Any]) -> str:
    content = operation.get("requestBody", {}).get("content", {})
    if not content:
        return ""
    (body,) = content.values()
    schema = body["schema"]
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
    required = schema.get("required", ())
    return " ".join(f"**`{name}`**" if name in required else f"`{name}`" for name in schema["properties"])


def _names(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(updated(path.read_text(encoding="utf-8")), encoding="utf-8")
