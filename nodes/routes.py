"""HTTP routes for the web panel and for scripts."""

from aiohttp import web
from server import PromptServer

from ..accel import stats


def register() -> None:
    """Adds ``GET /anyshape/stats`` to the running server; does nothing where there is none (tests in process)."""
    server = getattr(PromptServer, "instance", None)
    if server is not None:
        server.routes.get("/anyshape/stats")(_stats)


async def _stats(_: web.Request) -> web.Response:
    return web.json_response(stats.snapshot())
