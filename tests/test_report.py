"""The head of *Copy report*: what a maintainer would ask for first, and nothing that is the user's own."""

import platform
import sys
from importlib import metadata
from types import ModuleType
from typing import Any

import pytest
import torch

from tools.api_format import node, text_to_image
from tools.comfy_server import ComfyServer, PromptError
from tools.paths import ROOT


def flow() -> dict[str, dict[str, Any]]:
    """A step of the demo model with our nodes."""
    return text_to_image("1 2 4 5 8 9", (64, 64, 1), model=["6", 0], vae=["7", 0], steps=1) | {
        "3": node("AnyShapeCompileModel", model=["1", 0], mode="auto", graph_budget_mb=1024),
        "6": node("AnyShapeWarmUp", model=["3", 0], shapes="64x64\nno size", cfg="off"),
        "7": node("AnyShapeCompileVAE", vae=["1", 1], enabled=False),
    }


def report(server: ComfyServer) -> list[str]:
    return server.get("/anyshape/stats", format="text").text.splitlines()


def test_it_begins_with_what_a_maintainer_asks_for(server) -> None:
    server.free()  # or nodes that other tests have run like this would not run again
    server.run(flow())
    lines = report(server)
    version = (ROOT / "pyproject.toml").read_text().split('version = "')[1].split('"')[0]
    assert lines[0].startswith(f"AnyShape {version}, ComfyUI 0.") and "front end " in lines[0]
    versions = f"torch {torch.__version__}, Triton {metadata.version('triton')}, Python {platform.python_version()}"
    assert lines[1].startswith(versions)
    assert lines[2].startswith("Device: ") and lines[2].endswith(" GB") == (not torch.cuda.is_available())
    assert lines[3].startswith("DynamicVRAM ") and ", comfy-kitchen " in lines[3]
    assert lines[4].startswith("Started with: --listen 127.0.0.1 --port ") and "--use-pytorch-cross" in lines[4]
    nodes = lines[lines.index("Nodes:") + 1 :]
    assert "- CompileModel 3 (mode auto, graph_budget_mb 1024, verify True), ready" in nodes
    assert "- CompileVAE 7 (verify True), off" in nodes
    (warm,) = [line for line in nodes if line.startswith("- WarmUp 6 (")]
    assert (
        "(shapes 64x64 no size, cfg off, preset none, measure False), ready: line 2: 'no size' - write 1024x1152"
        in warm
    )


def test_it_has_the_latest_prompts_that_failed(server) -> None:
    """The node and the error, which is ComfyUI's own here."""
    for pattern in ("(1", "(2", "(3", "(4"):
        replace = node("RegexReplace", string="x", regex_pattern=pattern, replace="")
        with pytest.raises(PromptError):
            server.run({"1": replace, "2": node("PreviewAny", source=["1", 0])})
    lines = report(server)
    failed = lines[lines.index("Prompts that failed, the latest last:") + 1 :][:4]
    assert all(line.startswith("- RegexReplace: ") and "unterminated subpattern" in line for line in failed[:3])
    assert not failed[3].startswith("-")


def test_an_error_is_one_short_line(pack: ModuleType) -> None:
    from anyshape.nodes.bug_report import _error

    data = {
        "node_type": "Load",
        "exception_type": "OSError",
        "exception_message": "no\n '/srv/a b/c.bin' " + "x" * 9999,
    }
    text = _error(data)
    assert text.startswith("Load: OSError: no 'c.bin' xxx") and len(text) < 1100 and "\n" not in text


def test_no_path_has_the_users_name(pack: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from anyshape.accel.origin import readable
    from anyshape.nodes.bug_report import private, private_options

    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("USERPROFILE", "/home/ada")
    monkeypatch.setenv("USER", "lovelace")
    for module in ("/home/ada/ui/custom_nodes/pack.nodes", r"C:\Users\Ada L\ui\custom_nodes\pack.nodes", "pack.nodes"):
        assert readable(module) == "pack.nodes"
    assert private("in /home/ada/x, /home/ada and /home/adam") == "in ~/x, ~ and /home/adam"
    assert private("/mnt/ada/x /data/lovelace C:\\Users\\ada\\x ada") == "/mnt/~/x /data/~ C:\\Users\\~\\x ada"
    options = ["--output-directory", "/home/ada/out", "--base-directory=/srv/ada/ui", "--port", "8188", "/mnt/ada"]
    assert private_options(options) == "--output-directory ~/out --base-directory=/srv/~/ui --port 8188 /mnt/~"
    assert private_options(["--extra-model-paths-config", "/srv/of/somebody/paths.yaml"]).endswith("-config paths.yaml")


def test_secrets_are_not_in_it(pack: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from anyshape.nodes import bug_report

    monkeypatch.setenv("ANYSHAPE_FLEET_KEY", "hush")
    monkeypatch.setenv("ANYSHAPE_REDIS_URL", "redis://:hush@host")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:native")
    monkeypatch.setattr(sys, "argv", ["main.py"])
    text = bug_report.particulars()
    assert "hush" not in text and "ANYSHAPE_FLEET_KEY=(set) ANYSHAPE_REDIS_URL=(set)" in text
    assert "PYTORCH_CUDA_ALLOC_CONF=backend:native" in text and "Started with: no options" in text
