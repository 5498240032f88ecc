"""Reads the pack's page in ComfyUI's settings: from the user's file, at each prompt.

Nothing is kept, so that what is set holds from the next prompt on. With ``--multi-user`` each user has settings of
their own, and a request says whose it is; ComfyUI's hook for prompts gets no request, so a middleware notes the one
that a prompt comes with. A prompt that names no user has no settings: all is off.
"""

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from comfy.cli_args import args
from server import PromptServer

from ..accel.call import BUDGET_MB, MAX_BUDGET_MB
from .automatic import Choice, exceptions

AUTOMATIC, EXCEPTIONS, BUDGET, AT_START = (  # web/anyshape/settings.js has them too
    "AnyShape.Automatic", "AnyShape.Exceptions", "AnyShape.GraphBudget", "AnyShape.SizesAtStart",
)  # fmt: skip

_REQUEST: ContextVar[web.Request | None] = ContextVar("anyshape_request", default=None)


@dataclass(frozen=True)
class Preferences:
    """What a user has set; as here where nothing is set, or where a value is not one of the page's."""

    automatic: bool = False  # accelerate every model in every workflow
    at_start: bool = False  # warm up the sizes of the last session
    choice: Choice = Choice()


def of_prompt(server: PromptServer) -> Preferences:
    """Those of the user whose prompt is being queued."""
    try:
        stored = server.user_manager.settings.get_settings(_REQUEST.get())
    except web.HTTPException:  # nobody that this server knows
        return Preferences()
    return _read(stored) if isinstance(stored, dict) else Preferences()


def _read(stored: dict[str, Any]) -> Preferences:
    budget, listed = stored.get(BUDGET), stored.get(EXCEPTIONS)
    is_budget = isinstance(budget, int) and not isinstance(budget, bool) and 0 <= budget <= MAX_BUDGET_MB
    excepted = exceptions(listed) if isinstance(listed, str) else ()
    choice = Choice(budget if is_budget else BUDGET_MB, excepted)
    return Preferences(stored.get(AUTOMATIC) is True, stored.get(AT_START) is True, choice)


def follow_users(server: PromptServer) -> None:
    """Lets ``of_prompt`` know whose a prompt is, on a server with several users."""
    if args.multi_user:
        server.app.middlewares.append(_note)


@web.middleware
async def _note(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> Any:
    _REQUEST.set(request)  # for this request's task alone
    return await handler(request)
