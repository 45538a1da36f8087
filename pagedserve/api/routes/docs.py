"""`GET /docs`: routes and fields as one page that loads nothing from outside; FastAPI serves `/openapi.json`."""

from __future__ import annotations

from html import escape
from typing import Any

from fastapi import APIRouter, Request, Response

router = APIRouter(include_in_schema=False)

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h2 { font: 600 1rem ui-monospace, monospace; border-top: 1px solid #ddd; padding-top: 1rem; }
b { background: #eef; border-radius: 4px; padding: 0 .4rem; } table { border-collapse: collapse; }
td { padding: .15rem .8rem .15rem 0; vertical-align: top; } td:first-child, td:nth-child(2) { font-family: monospace; }
"""


@router.get("/docs")
async def docs(request: Request) -> Response:
    """Routes, fields and types, from the OpenAPI document."""
    document: dict[str, Any] = request.app.openapi()
    sections = [
        _section(document, method, path, operation)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]
    title = escape(document["info"]["title"])
    page = (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
        f"<h1>{title}</h1><p>{escape(document['info']['description'])} Machine-readable: "
        f'<a href="openapi.json">openapi.json</a>.</p>{"".join(sections)}</html>'
    )
    return Response(page, media_type="text/html")


def _section(document: dict[str, Any], method: str, path: str, operation: dict[str, Any]) -> str:
    heading = f"<h2><b>{method.upper()}</b> {escape(path)}</h2><p>{escape(operation.get('description', ''))}</p>"
    content = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if content is None:
        return heading
    schema = document["components"]["schemas"][content["schema"]["$ref"].rsplit("/", 1)[1]]
    required = schema.get("required", ())
    rows = [
        f"<tr><td>{escape(name)}{'*' if name in required else ''}</td><td>{escape(_type_of(field))}</td>"
        f"<td>{escape(field.get('description', ''))}</td></tr>"
        for name, field in schema["properties"].items()
    ]
    return f"{heading}<table>{''.join(rows)}</table>"


def _type_of(field: dict[str, Any]) -> str:
    if "$ref" in field:
        return field["$ref"].rsplit("/", 1)[1]
    if "anyOf" in field:
        return " | ".join(name for arm in field["anyOf"] if (name := _type_of(arm)) != "null")
    if field.get("type") == "array":
        return f"[{_type_of(field.get('items', {}))}]"
    return str(field.get("type", "any"))
