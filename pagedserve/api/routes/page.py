"""`GET /`: chat with the served model in a browser. Three static files that ask nobody but this server."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Response

router = APIRouter(include_in_schema=False)

_FOLDER = Path(__file__).parents[1] / "page"
_HEADERS = {
    # What a model says can then neither load nor run anything, even if it were taken for markup.
    "Content-Security-Policy": (
        "default-src 'self'; img-src data:; object-src 'none'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def _file(name: str, media_type: str) -> Response:
    return Response((_FOLDER / name).read_bytes(), media_type=media_type, headers=_HEADERS)


@router.get("/")
async def page() -> Response:
    """The page."""
    return _file("index.html", "text/html")


@router.get("/page.css")
async def style() -> Response:
    """Its looks."""
    return _file("page.css", "text/css")


@router.get("/page.js")
async def script() -> Response:
    """What it does."""
    return _file("page.js", "text/javascript")
