"""The web server: routes, and who may call them.

On loopback no token is needed, but requests must name loopback as their host (a page elsewhere cannot rebind a name of
its own to it) and changes must carry a header that another site's form cannot send. On another address every request
needs the token. All pages carry a content security policy that runs nothing but the viewer's own files.
"""

from __future__ import annotations

import hmac
import logging
import re
from collections.abc import Awaitable, Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, RedirectResponse, Response
from starlette.staticfiles import StaticFiles

from k3rl.errors import UserError
from k3rl.viewer.filter import FilterError
from k3rl.viewer.routes import add_routes
from k3rl.viewer.session import Session

log = logging.getLogger(__name__)
LOOPBACK = {"127.0.0.1", "localhost", "::1"}
STATIC = Path(str(files("k3rl.viewer") / "static"))
COOKIE = "k3rl_viewer"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def make_app(session: Session, host: str = "127.0.0.1", token: str = "") -> FastAPI:
    """``token`` empty: none is asked for; then only loopback names are answered."""
    app = FastAPI(title="k3rl view", docs_url=None, redoc_url=None, openapi_url=None)

    @app.middleware("http")
    async def guard(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        refused = _refusal(request, host, token)
        if refused is not None:
            response = refused
        else:
            try:
                response = await call_next(request)
            except Exception as error:  # the border to people: a page, and the trace for the terminal
                log.exception("%s", request.url.path)
                text = f"the viewer failed: {type(error).__name__}: {error}; its terminal holds the trace"
                response = JSONResponse({"error": text}, 500)
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    @app.exception_handler(UserError)
    async def user_error(_: Request, error: UserError) -> JSONResponse:
        body: dict[str, Any] = {"error": str(error)}
        if isinstance(error, FilterError):
            body["position"] = error.position
        return JSONResponse(body, 400)

    @app.exception_handler(RequestValidationError)
    async def bad_request(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        return JSONResponse(
            {"error": f"bad request: {'.'.join(map(str, first['loc']))}: {first['msg']}"}, 400
        )

    add_routes(app, session)
    app.mount("/", StaticFiles(directory=STATIC, html=True))
    return app


def _refusal(request: Request, host: str, token: str) -> Response | None:
    """Why a request is not answered; None where it is."""
    named = host_name(request.headers.get("host", ""))
    allowed = LOOPBACK | {host} if host not in ("0.0.0.0", "::") else None
    if allowed is not None and named not in allowed:
        return JSONResponse({"error": f"this viewer does not answer to the host name '{named}'"}, 403)
    if token and not _has_token(request, token):
        given = request.query_params.get("token", "")
        if request.method == "GET" and hmac.compare_digest(given.encode(), token.encode()):
            response: Response = RedirectResponse(request.url.path, 303)
            response.set_cookie(COOKIE, token, httponly=True, samesite="strict")
            return response
        return JSONResponse(
            {"error": "the access token is missing: open the address that `k3rl view` printed"}, 401
        )
    if request.method not in ("GET", "HEAD"):
        origin = request.headers.get("origin")
        if request.headers.get("x-k3rl") != "1":
            return JSONResponse({"error": "changes need the header X-K3RL: 1"}, 403)
        if origin and host_name(re.sub(r"^\w+://", "", origin)) != named:
            return JSONResponse({"error": "changes come from the viewer's own pages only"}, 403)
    return None


def _has_token(request: Request, token: str) -> bool:
    bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
    given = request.cookies.get(COOKIE) or bearer
    return hmac.compare_digest(given.encode(), token.encode())


def host_name(header: str) -> str:
    """``localhost`` of ``localhost:8800``, ``::1`` of ``[::1]:8800``."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].lower()
