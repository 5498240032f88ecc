"""HTTP routes for the web panel and for scripts. Errors are JSON: ``{"error": what is wrong and what is accepted}``.

ComfyUI's middleware refuses requests from other origins, as for its own routes.
"""

import asyncio
import json
from typing import Any

from aiohttp import web
from server import PromptServer

from ..accel import graphs, stats
from ..accel.artifacts.compiled_for import pack_version
from ..accel.attempt import attempt, named
from . import help_pages
from .bug_report import comfyui, particulars
from .live import Live
from .metrics import CONTENT_TYPE, exposition
from .report import report

FORMATS = ("json", "text")
MAX_BODY = 256  # bytes; {"graphs": true} has 16
CLEAR_KEYS = ("graphs",)
JSON_NAMES = {list: "array", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}


def register() -> None:
    """Adds the routes to the running server; does nothing where there is none (tests in process)."""
    server = getattr(PromptServer, "instance", None)
    if server is None:
        return
    live = Live(server)

    async def cleared(request: web.Request) -> web.Response:
        response = await _clear(request)
        live.push()
        return response

    server.routes.get("/anyshape/stats")(_stats)
    server.routes.get("/anyshape/metrics")(_metrics)
    help_pages.register(server)
    server.routes.post("/anyshape/clear")(cleared)


class _Refused(ValueError):
    """A request that is wrong; the text is for the user."""


async def _stats(request: web.Request) -> web.Response:
    """GET: the counters, as JSON or (``?format=text``) as a report of this machine and Shape Cache Info's tables."""
    unknown = sorted(set(request.query) - {"format"})
    wanted = request.query.get("format", FORMATS[0])
    if unknown:
        return _error(f"unknown query {unknown[0]!r}; accepted: format")
    if wanted not in FORMATS:
        return _error(f"format is {wanted!r}; choose one of {', '.join(FORMATS)}")
    now = stats.snapshot()
    if wanted == "json":
        return web.json_response(now)
    head = await asyncio.to_thread(particulars)  # in another thread: the driver's tool takes its time
    return web.Response(text=f"{head}\n\n{report(now)}")


async def _metrics(request: web.Request) -> web.Response:
    """GET: the counters in Prometheus' text format."""
    if unknown := sorted(request.query):
        return _error(f"unknown query {unknown[0]!r}; none is accepted")
    found, versions = stats.STATS, {"version": pack_version(), "comfyui": comfyui}
    text = exposition(found.snapshot(), found.totals, found.prompts.count, versions)
    return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})


async def _clear(request: web.Request) -> web.Response:
    """POST: forgets what was counted; ``{"graphs": true}`` also frees the memory of all CUDA graphs."""
    try:
        drop_graphs = _wants_graphs(await request.read())
    except _Refused as refusal:
        return _error(str(refusal))
    if drop_graphs:  # in another thread: it waits for a capture that is going on
        _, failure = await asyncio.to_thread(attempt, graphs.clear, named)
        if failure:
            return _error(f"the graphs could not be dropped ({failure})", 500)
    stats.STATS.clear()
    return web.json_response(stats.snapshot())


def _wants_graphs(body: bytes) -> bool:
    """What the body asks for. Raises ``_Refused``."""
    options = _object(body) if body.strip() else {}
    unknown = sorted(set(options) - set(CLEAR_KEYS))
    if unknown:
        raise _Refused(f"unknown key {unknown[0]!r}; accepted: {', '.join(CLEAR_KEYS)}")
    wanted = options.get("graphs", False)
    if not isinstance(wanted, bool):
        raise _Refused(f"graphs is {json.dumps(wanted)}; give true or false")
    return wanted


def _object(body: bytes) -> dict[str, Any]:
    if len(body) > MAX_BODY:
        raise _Refused(f"the body is longer than {MAX_BODY} bytes; accepted keys: {', '.join(CLEAR_KEYS)}")
    try:
        options = json.loads(body)
    except ValueError as error:
        raise _Refused('the body is not JSON; give a JSON object, as {"graphs": true}, or nothing') from error
    if not isinstance(options, dict):
        kind = JSON_NAMES[type(options)]
        raise _Refused(f'the body is JSON of type {kind}; give an object, as {{"graphs": true}}, or nothing')
    return options


def _error(message: str, status: int = 400) -> web.Response:
    return web.json_response({"error": message}, status=status)
