"""The side panel's routes on ComfyUI's server: questions by GET, actions by POST of ComfyUI's own page."""

import asyncio
import json
from collections.abc import Callable, Mapping
from functools import partial
from urllib.parse import urlsplit

from aiohttp import web

PREFIX = "/parallel_dit"


def is_of_page(headers: Mapping[str, str]) -> bool:
    """Return whether a request is ComfyUI's own page's, or no browser's. As ComfyUI's middleware, which is
    absent under --enable-cors-header, and without pages of other ports of this machine."""
    site = headers.get("Sec-Fetch-Site")
    if site is not None:
        return site == "same-origin"
    origin = headers.get("Origin")
    return origin is None or urlsplit(origin).netloc.lower() == headers.get("Host", "").lower()


def add_routes(
    routes: web.RouteTableDef,
    questions: Mapping[str, Callable[[], object]],
    actions: Mapping[str, Callable[[dict], object]],
    mistakes: tuple[type[Exception], ...],
):
    """Answer GET PREFIX/NAME by ``questions`` and POST PREFIX/NAME by ``actions``, each on a thread. An
    action gets the JSON object of the body. A text is answered as such, anything else as JSON, and one of
    ``mistakes`` as 400 with its sentence."""

    async def answered(call: Callable[[], object]) -> web.Response:
        try:
            found = await asyncio.to_thread(call)
        except mistakes as error:
            return web.json_response({"error": str(error)}, status=400)
        return web.Response(text=found) if isinstance(found, str) else web.json_response(found)

    # functions, not partials: aiohttp prints a route with its handler's __name__
    def ask(question: Callable[[], object]):
        async def handle(request) -> web.Response:
            return await answered(question)

        return handle

    def act(action: Callable[[dict], object]):
        async def handle(request) -> web.Response:
            if not is_of_page(request.headers):
                return web.json_response({"error": "the request comes from another page."}, status=403)
            try:
                body = await request.json()
            except json.JSONDecodeError:
                body = None
            if not isinstance(body, dict):
                return web.json_response({"error": "the body is no JSON object."}, status=400)
            return await answered(partial(action, body))

        return handle

    for name, question in questions.items():
        routes.get(f"{PREFIX}/{name}")(ask(question))
    for name, action in actions.items():
        routes.post(f"{PREFIX}/{name}")(act(action))
