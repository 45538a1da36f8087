"""The OpenAPI document. Routes read their bodies themselves, so each says here what it takes and gives."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from pydantic import BaseModel
from starlette.responses import Response

from pagedserve.api.errors import ANTHROPIC_PATH

_REF = "#/components/schemas/{model}"
_MSGSPEC_REF = "#/components/schemas/{name}"
_SCHEMAS: dict[str, Any] = {
    "Error": {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "null"]},
                },
            }
        },
    },
    "AnthropicError": {
        "type": "object",
        "required": ["type", "error"],
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "required": ["type", "message"],
                "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
            },
        },
    },
}


def documented(
    request: type[BaseModel] | None, response: type[msgspec.Struct], *, stream: bool = False
) -> dict[str, Any]:
    """Arguments of a route decorator that describe its body and its answer."""
    (schema,), components = msgspec.json.schema_components([response], ref_template=_MSGSPEC_REF)
    for name, component in components.items():
        _add(name, component)
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    if stream:
        content["text/event-stream"] = {}  # OpenAPI has no word yet for what its events hold
    extra = _answers(content)
    if request is not None:
        _add_pydantic(request)
        reference = {"$ref": _REF.format(model=request.__name__)}
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference}}}
    return {"openapi_extra": extra, "response_model": None}


def documented_text(media_type: str) -> dict[str, Any]:
    """As `documented`, for a route that answers with text."""
    extra = _answers({media_type: {"schema": {"type": "string"}}})
    return {"openapi_extra": extra, "response_model": None, "response_class": Response}


def documented_upload(response: type[msgspec.Struct]) -> dict[str, Any]:
    """As `documented`, for a route that takes a file in a form."""
    options = documented(None, response)
    fields = {"file": {"type": "string", "format": "binary"}, "purpose": {"type": "string", "enum": ["batch"]}}
    schema = {"type": "object", "required": ["file", "purpose"], "properties": fields}
    options["openapi_extra"]["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": schema}}}
    return options


def install(app: FastAPI) -> None:
    """Let `app.openapi()` hold the schemas that `documented` collected."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        document["components"] = {"schemas": dict(_SCHEMAS)}
        for path, operations in document["paths"].items():
            for operation in operations.values():
                # FastAPI's own, which never comes: what is wrong with a parameter is found, and named, by the route.
                operation["responses"].pop("422", None)
                if path.startswith(ANTHROPIC_PATH):
                    operation["responses"]["default"] = _error("AnthropicError")
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _add_pydantic(model: type[BaseModel]) -> None:
    schema = model.model_json_schema(ref_template=_REF)
    for name, component in {**schema.pop("$defs", {}), model.__name__: schema}.items():
        _add(name, component)


def _add(name: str, schema: dict[str, Any]) -> None:
    assert _SCHEMAS.setdefault(name, schema) == schema, f"two schemas are called {name}"


def _answers(content: dict[str, Any]) -> dict[str, Any]:
    return {"responses": {"200": {"description": "OK", "content": content}, "default": _error("Error")}}


def _error(schema: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": _REF.format(model=schema)}}}
    return {"description": "Error", "content": content}
