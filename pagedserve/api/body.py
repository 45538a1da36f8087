"""Reading a request body: bounded, strictly JSON, every field accounted for."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncGenerator
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from pagedserve.api.errors import BodyTooLargeError, ClientGoneError, MediaTypeError
from pagedserve.errors import DeadlineExceededError, RequestError

Model = TypeVar("Model", bound=BaseModel)

# A body may be slow, but not silent for longer.
PART_SECONDS = 60.0
# After that long it must have come at this rate: drops of a byte hold a connection for little.
MIN_BYTES_PER_SECOND = 1024
# Larger bodies take milliseconds to parse, which the event loop has better uses for.
LARGE_BODY = 1 << 18

_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


async def read_json(request: Request, max_bytes: int) -> dict[str, Any]:
    """The body as a JSON object (RFC 8259), without the null fields: null means absent.

    Raises MediaTypeError, BodyTooLargeError, or RequestError for what is not one JSON object with unique keys, valid
    Unicode and finite numbers; the message names the field where there is one.
    """
    _check_media_type(request)
    raw = await _read(request, max_bytes)
    # In a thread, which the loop interrupts every few milliseconds.
    return await asyncio.to_thread(_parse, raw) if len(raw) > LARGE_BODY else _parse(raw)


def _parse(raw: bytes) -> dict[str, Any]:
    constants: list[str] = []

    def constant(name: str) -> float:
        constants.append(name)
        return float(name)

    try:
        value = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=_object, parse_constant=constant)
    except UnicodeDecodeError as error:
        raise RequestError("the body is not valid UTF-8") from error
    except RecursionError as error:
        raise RequestError("the body is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise RequestError(
            f"the body is not valid JSON: {error.msg} at line {error.lineno} column {error.colno}"
        ) from error
    except ValueError as error:
        raise RequestError("the body holds a number of too many digits") from error
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    if constants:
        name = next((name for name, field in value.items() if _holds_constant(field)), None)
        raise RequestError(f"{name}: {constants[0]} is not JSON; numbers must be finite", param=name)
    if _SURROGATE_ESCAPE.search(raw):
        _check_surrogates(value)
    return {name: field for name, field in value.items() if field is not None}


def validate(model: type[Model], body: dict[str, Any]) -> Model:
    """`body` as `model`; RequestError names the first field that is wrong."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise _field_error(first["type"], first["loc"], first["msg"]) from error
    except RecursionError as error:
        raise RequestError("the body is nested too deeply") from error


async def validated(request: Request, model: type[Model], body: dict[str, Any]) -> Model:
    """As `validate`; a large body of `request` does not hold up the event loop."""
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) <= LARGE_BODY:
        return validate(model, body)
    return await asyncio.to_thread(validate, model, body)


def unknown_fields(model: type[BaseModel], body: dict[str, Any]) -> list[str]:
    """Names in `body` that `model` does not know, in the order sent."""
    known = model.model_fields
    return [name for name in body if name not in known]


def _check_media_type(request: Request) -> None:
    media_type, *parameters = request.headers.get("content-type", "").lower().split(";")
    if media_type.strip() != "application/json":
        raise MediaTypeError("send the body with the header Content-Type: application/json")
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "charset" and value.strip().strip('"') not in ("utf-8", "utf8"):
            raise MediaTypeError("JSON is sent as UTF-8")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise MediaTypeError("compressed bodies are not accepted; send the body without Content-Encoding")


async def _read(request: Request, max_bytes: int) -> bytes:
    too_large = BodyTooLargeError(f"the body exceeds the limit of {max_bytes} bytes")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > max_bytes:
        raise too_large
    received: list[bytes] = []
    size = 0
    async for part in parts(request):
        size += len(part)
        if size > max_bytes:
            raise too_large
        received.append(part)
    return b"".join(received)


async def parts(request: Request) -> AsyncGenerator[bytes, None]:
    """The raw body as it comes. ClientGoneError where it breaks off, DeadlineExceededError where it stands still."""
    now = asyncio.get_running_loop().time
    started, size = now(), 0
    try:
        async with asyncio.timeout(PART_SECONDS) as limit:
            async for part in request.stream():
                limit.reschedule(now() + PART_SECONDS)
                size += len(part)
                seconds = now() - started
                if seconds > PART_SECONDS and size < seconds * MIN_BYTES_PER_SECOND:
                    raise DeadlineExceededError(f"the body came at less than {MIN_BYTES_PER_SECOND} bytes a second")
                yield part
    except ClientDisconnect as error:
        raise ClientGoneError("the client left before its body was complete") from error
    except TimeoutError as error:
        raise DeadlineExceededError(f"nothing came for {PART_SECONDS:.0f} s, and the body is not complete") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys are unique: of two equal keys, whichever won, one would be dropped silently."""
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise RequestError(f"the key {repeated!r} occurs twice in one object", param=repeated)
    return result


def _holds_constant(value: Any) -> bool:
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, dict):
        return any(map(_holds_constant, value.values()))
    return isinstance(value, list) and any(map(_holds_constant, value))


def _check_surrogates(value: dict[str, Any]) -> None:
    for name, field in value.items():
        try:
            json.dumps({name: field}, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(f"{name!a} holds half of a surrogate pair, which is no character", param=name) from error


def _field_error(kind: str, loc: tuple[int | str, ...], message: str) -> RequestError:
    name = ".".join(str(part) for part in loc)
    if kind == "missing":
        return RequestError(f"{name} is required", param=name, code="missing_required_parameter")
    # Messages of our own validators come with pydantic's prefix; they already name the field.
    own = message.removeprefix("Value error, ")
    text = own if own != message else f"{name}: {message[0].lower()}{message[1:]}"
    return RequestError(text, param=name or None)
