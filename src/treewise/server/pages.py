"""The web page at `/`: files of the package, with headers that let a browser ask nobody else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.staticfiles import StaticFiles

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # asked for again each time, sent again only if it has changed
}
"""Of every file of the page."""


class Files(StaticFiles):
    """The files of a folder, with `HEADERS`."""

    def file_response(self, *arguments: Any, **options: Any) -> Response:
        """Return the response that sends a file, or says that it has not changed."""
        response = super().file_response(*arguments, **options)
        response.headers.update(HEADERS)
        return response


def add_page(app: FastAPI) -> None:
    """Add the page at `/` and its files under `/page` to an application."""
    files = Files(directory=Path(__file__).parent / "page")

    async def page(request: Request) -> Response:
        """Return the web page."""
        return await files.get_response("index.html", request.scope)

    app.add_api_route("/", page, methods=["GET"], include_in_schema=False)
    app.mount("/page", files, name="page")
