"""Serves the help pages in the requested language, or in English if there is none in it.

The front end asks for ``<node>/<language>.md`` first, ``en`` included, and for ``<node>.md`` after a 404, which every
browser's console shows. This answers the first question, so that no text lies in two files.
"""

from pathlib import Path

from aiohttp import web
from server import PromptServer

PACK = Path(__file__).parent.parent  # not resolved: a pack has the name of its folder, or of the link to it
DOCS = PACK / "web" / "docs"
ADDRESS = rf"/extensions/{PACK.name}/docs/{{node:AnyShape\w+}}/{{language:[\w-]+}}.md"


def register(server: PromptServer) -> None:
    """Adds the route, which comes before that of the pack's files."""
    server.routes.get(ADDRESS)(_page)


async def _page(request: web.Request) -> web.Response:
    node, language = request.match_info["node"], request.match_info["language"]
    pages = [DOCS / node / f"{name}.md" for name in (language, language.split("-")[0])]
    found = next((page for page in [*pages, DOCS / f"{node}.md"] if page.is_file()), None)
    if found is None:
        raise web.HTTPNotFound
    return web.Response(text=found.read_text(encoding="utf-8"), content_type="text/markdown", charset="utf-8")
