"""Follows one prompt on ComfyUI's websocket until it has ended."""

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp

OnProgress = Callable[[str, dict[str, Any]], None]


class PromptError(RuntimeError):
    """A prompt failed or was refused. Carries `node_id`, `node_type`, `kind` and, of a failed node, `traceback`."""

    def __init__(
        self, message: str, node_id: str = "", node_type: str = "", kind: str = "", traceback: str = ""
    ) -> None:
        super().__init__(message)
        self.node_id, self.node_type, self.kind, self.traceback = node_id, node_type, kind, traceback

    @classmethod
    def failed(cls, data: dict[str, Any]) -> "PromptError":
        """From an `execution_error` message."""
        where = f"node {data['node_id']} ({data['node_type']})"
        trace = "".join(data.get("traceback", []))
        message = f"{where} failed with {data['exception_type']}: {data['exception_message'].strip()}\n{trace}"
        return cls(message, data["node_id"], data["node_type"], data["exception_type"], trace)

    @classmethod
    def refused(cls, reply: dict[str, Any]) -> "PromptError":
        """From the reply to a prompt that did not pass ComfyUI's validation."""
        lines, node_id, node_type = [f"ComfyUI refused the workflow: {reply['error']['message']}"], "", ""
        for node_id, node in reply.get("node_errors", {}).items():  # noqa: B007 - the last one names the node
            node_type = node["class_type"]
            lines += [f"node {node_id} ({node_type}): {e['message']}: {e['details']}" for e in node["errors"]]
        return cls("\n".join(lines), node_id, node_type, reply["error"]["type"])


def follow_prompt(url: str, queue: Callable[[], str], on_progress: OnProgress | None, timeout: float) -> str:
    """Waits for the end of the prompt that `queue` queues, and returns its id. url: of the websocket.

    Raises PromptError where ComfyUI reports a failure, ConnectionError or TimeoutError where it stops answering.
    """
    return asyncio.run(asyncio.wait_for(_follow(url, queue, on_progress), timeout))


async def _follow(url: str, queue: Callable[[], str], on_progress: OnProgress | None) -> str:
    ticking = asyncio.create_task(_tick(on_progress)) if on_progress else None
    try:
        return await _listen(url, queue, on_progress)
    finally:
        if ticking:
            ticking.cancel()


async def _tick(on_progress: OnProgress) -> None:
    """ComfyUI says nothing while a model compiles; whoever waits hears at least that a second has passed."""
    while True:
        await asyncio.sleep(1)
        on_progress("waiting", {})


async def _listen(url: str, queue: Callable[[], str], on_progress: OnProgress | None) -> str:
    # The socket is open before the prompt is queued, so that no message is missed.
    async with aiohttp.ClientSession() as session, session.ws_connect(url, max_msg_size=0) as socket:
        prompt_id = await asyncio.to_thread(queue)
        failure = None
        async for kind, data in _messages(socket, prompt_id):
            if on_progress:
                on_progress(kind, data)
            if kind == "execution_error":
                failure = PromptError.failed(data)
            elif kind == "execution_interrupted":
                failure = PromptError("The prompt was interrupted.", data["node_id"], data["node_type"], kind)
            elif kind == "executing" and data["node"] is None:  # sent once the prompt is in the history
                break
        else:
            raise ConnectionError("it closed the websocket (it may have crashed)")
    if failure:
        raise failure
    return prompt_id


async def _messages(socket: aiohttp.ClientWebSocketResponse, prompt_id: str) -> Any:
    """The JSON messages about one prompt; binary previews and other prompts' messages are left out."""
    async for message in socket:
        if message.type is not aiohttp.WSMsgType.TEXT:
            continue
        content = message.json()
        if content["data"].get("prompt_id") == prompt_id:
            yield content["type"], content["data"]
