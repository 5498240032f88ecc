"""The real ComfyUI server, started for tests and the demo, and a small client for it.

    with ComfyServer() as server:
        entry = server.run(workflow)                       # the prompt's entry in /history
        picture = server.view(entry["outputs"]["9"]["images"][0])

The server runs in a process of its own on a free loopback port, with a base directory of its own under
`.cache/server`, so it reads and writes nothing of a ComfyUI that a person uses. A workflow is in ComfyUI's API format:
`{node id: {"class_type": ..., "inputs": {...}}}`.
"""

import importlib.util
import io
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import requests
from PIL import Image

from tools.client_socket import OnProgress, PromptError, follow_prompt
from tools.embed import has_cuda, make_base
from tools.paths import CACHE, FRONT_END, ROOT, ProjectError, comfyui_path, project_env

__all__ = ["ComfyServer", "PromptError", "ServerError", "prompt_seconds"]

Workflow = dict[str, dict[str, Any]]

# Folder name in custom_nodes -> the folder that holds the pack.
START_TIMEOUT = 180  # seconds until the server must answer
PACKS = {"AnyShape": ROOT, "anyshape_demo": ROOT / "demo"}


class ServerError(ProjectError):
    """The server did not start, died, or did not answer; the message ends with the last lines of its log."""


def prompt_seconds(entry: dict[str, Any]) -> float:
    """How long a prompt ran in the server, from a history entry: execution_start to its end, in seconds."""
    stamps = {name: data["timestamp"] for name, data in entry["status"]["messages"] if "timestamp" in data}
    return (stamps["execution_success"] - stamps["execution_start"]) / 1000


def front_end(comfyui: Path | None = None) -> Path | None:
    """The web page for a ComfyUI (this one, if not given): its version's own, else the installed one, if any."""
    own = (comfyui or comfyui_path()) / FRONT_END
    if own.is_dir():
        return own
    package = importlib.util.find_spec("comfyui_frontend_package")
    return Path(package.origin).parent / "static" if package else None


class ComfyServer:
    """A running ComfyUI with the pack and the demo nodes; a context manager.

    packs: the node packs to load, `{folder name in custom_nodes: folder}`. A pack that fails to import is an error.
    arguments: more command line arguments for ComfyUI.
    home: a ComfyUI to start as its user would, with its own custom_nodes, models and output, and without `packs`.
    """

    def __init__(
        self,
        packs: dict[str, Path] | None = None,
        arguments: tuple[str, ...] = (),
        home: Path | None = None,
    ) -> None:
        self.packs = {name: folder for name, folder in PACKS.items() if (folder / "__init__.py").exists()}
        if packs is not None:
            self.packs = packs
        self.arguments = arguments
        self.home = home
        self.client_id = "anyshape-tools"
        self.http = requests.Session()
        self.http.trust_env = False  # a proxy has no business between this process and the loopback

    # Starting and stopping ---------------------------------------------------------------------------------------

    def __enter__(self) -> "ComfyServer":
        self.comfyui = self.home or comfyui_path()
        self.base = self.home or self._make_base()
        self.log_file = self.base / "server.log"
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._start()
        try:
            self._wait_until_up()
            self._check_packs()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make_base(self) -> Path:
        (CACHE / "server").mkdir(parents=True, exist_ok=True)
        base = make_base(Path(tempfile.mkdtemp(dir=CACHE / "server")))
        for name, folder in self.packs.items():
            (base / "custom_nodes" / name).symlink_to(folder, target_is_directory=True)
        return base

    def _start(self) -> None:
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                self._command(),
                cwd=self.base,
                env=_server_env(self.comfyui),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that its compile workers can be stopped with it
            )

    def _command(self) -> list[str]:
        command = [sys.executable, str(self.comfyui / "main.py"), "--listen", "127.0.0.1", "--port", str(self.port)]
        command += ["--base-directory", str(self.base), "--database-url", "sqlite:///:memory:"]
        command += ["--disable-auto-launch", "--dont-print-server", "--disable-api-nodes"]
        command += [
            "--use-pytorch-cross-attention",
            *(["--cpu"] if not has_cuda() else []),
            *self._frontend(),
            *self.arguments,
        ]
        return command

    def _frontend(self) -> list[str]:
        """ComfyUI wants a web page to serve; where there is no front end an empty one will do."""
        page = front_end(self.comfyui)
        if page is None:
            page = self.base / "frontend"
            page.mkdir()
            (page / "index.html").touch()
        return ["--front-end-root", str(page)]

    def _wait_until_up(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise self.error(f"ComfyUI ended with exit code {self.process.returncode} while it was starting.")
            try:
                return self._request("GET", "/system_stats", timeout=5).raise_for_status()
            except requests.ConnectionError:
                time.sleep(0.2)
        raise self.error(f"ComfyUI did not answer within {START_TIMEOUT:.0f} s of its start.")

    def _check_packs(self) -> None:
        failed = [line for line in self.log().splitlines() if "IMPORT FAILED" in line and str(self.base) in line]
        if failed:
            raise self.error("ComfyUI could not import a node pack: " + "; ".join(failed))

    def __exit__(self, *_: object) -> None:
        self._signal(signal.SIGTERM)
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self.process.wait(timeout=10)
        self.http.close()
        if not self.home:
            shutil.rmtree(self.base, ignore_errors=True)

    def _signal(self, which: int) -> None:
        try:
            os.killpg(self.process.pid, which)
        except ProcessLookupError:
            pass  # it has already ended

    def log(self) -> str:
        """All that the server has printed so far."""
        return self.log_file.read_text(errors="replace")

    def error(self, message: str) -> ServerError:
        """A ServerError with the end of the log."""
        tail = "\n".join(self.log().splitlines()[-40:])
        return ServerError(f"{message}\nThe end of its log:\n{tail}")

    # The client --------------------------------------------------------------------------------------------------

    def _request(self, method: str, path: str, timeout: float = 60, **more: Any) -> requests.Response:
        return self.http.request(method, self.url + path, timeout=timeout, **more)

    def get(self, path: str, **query: Any) -> requests.Response:
        """GET a path such as `/anyshape/stats`; an HTTP error status raises."""
        response = self._request("GET", path, params=query)
        response.raise_for_status()
        return response

    def object_info(self) -> dict[str, Any]:
        """Every node's inputs and outputs by node id, as the frontend sees them."""
        return self.get("/object_info").json()

    def queue(self, workflow: Workflow) -> str:
        """Queue a workflow and return its prompt id; a workflow that ComfyUI refuses raises PromptError."""
        response = self._request("POST", "/prompt", json={"prompt": workflow, "client_id": self.client_id})
        if response.status_code == 400:
            raise PromptError.refused(response.json())
        response.raise_for_status()
        return response.json()["prompt_id"]

    def run(self, workflow: Workflow, on_progress: OnProgress | None = None, timeout: float = 600) -> dict[str, Any]:
        """Queue a workflow, follow it to its end, and return its history entry (`outputs`, `status`).

        on_progress: called with each websocket message's type and data: `("progress", {"value": 3, "max": 8, ...})`,
        and with `("waiting", {})` every second.
        timeout: seconds for the whole prompt.
        """
        try:
            socket_url = f"{self.url}/ws?clientId={self.client_id}"
            prompt_id = follow_prompt(socket_url, lambda: self.queue(workflow), on_progress, timeout)
        except (ConnectionError, TimeoutError, requests.ConnectionError) as failure:
            raise self.error(f"ComfyUI did not finish the prompt: {failure}") from failure
        return self.history(prompt_id)

    def history(self, prompt_id: str) -> dict[str, Any]:
        """The history entry of a prompt that has ended."""
        return self.get(f"/history/{prompt_id}").json()[prompt_id]

    def view(self, image: dict[str, str]) -> Image.Image:
        """A picture by its entry in a node's output: `{"filename", "subfolder", "type"}`."""
        return Image.open(io.BytesIO(self.get("/view", **image).content))

    def interrupt(self) -> None:
        """Stop the prompt that is running."""
        self._request("POST", "/interrupt").raise_for_status()

    def free(self) -> None:
        """Unload all models and drop the cached outputs."""
        self._request("POST", "/free", json={"unload_models": True, "free_memory": True}).raise_for_status()


def _server_env(comfyui: Path) -> dict[str, str]:
    env = {**os.environ, **project_env(), "PYTHONUNBUFFERED": "1"}
    if ROOT not in comfyui.parents:
        env["PYTHONPYCACHEPREFIX"] = str(CACHE / "pyc")  # write nothing into a ComfyUI that is not ours
    env.pop("TRITON_INTERPRET", None)  # the tests' own kernels are interpreted; a user's server is not started so
    kept = [entry for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry and Path(entry).resolve() != ROOT]
    env["PYTHONPATH"] = os.pathsep.join(kept)
    return env


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
