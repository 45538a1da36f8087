"""The OpenAPI document. Routes read their bodies themselves, so each says here what it takes and gives."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from pydantic import BaseModel

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
    }
}


def documented(
    request: type[BaseModel] | None, response: type[msgspec.Struct], *, stream: bool = False
) -> dict[str, Any]:
    """Arguments of a route decorator that describe its body and its answer."""
    (schema,), components = msgspec.json.schema_components([response], ref_template=_MSGSPEC_REF)
    _SCHEMAS.update(components)
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    if stream:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    error = {"description": "Error", "content": {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}}}
    extra: dict[str, Any] = {"responses": {"200": {"description": "OK", "content": content}, "default": error}}
    if request is not None:
        _add_pydantic(request)
        reference = {"$ref": _REF.format(model=request.__name__)}
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference}}}
    return {"openapi_extra": extra, "response_model": None}


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
        document.setdefault("components", {}).setdefault("schemas", {}).update(_SCHEMAS)
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _add_pydantic(model: type[BaseModel]) -> None:
    schema = model.model_json_schema(ref_template=_REF)
    _SCHEMAS.update(schema.pop("$defs", {}))
    _SCHEMAS[model.__name__] = schema
