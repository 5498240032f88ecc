"""A torch or a ComfyUI that is too old: one sentence in the log, no nodes, no traceback."""

import asyncio
import logging
import re
import shutil
import sys

import pytest

from tools import embed
from tools.paths import ROOT

embed.bare_pack()

from anyshape.accel import minimum  # noqa: E402 - the package exists from the line above on


def unmet(monkeypatch, torch, comfyui, python="3.10.13"):
    monkeypatch.setattr(minimum, "_python", lambda: python)
    monkeypatch.setattr(minimum, "_torch", lambda: torch)
    monkeypatch.setattr(minimum, "_comfyui", lambda: comfyui)
    return minimum.unmet()


@pytest.mark.parametrize("torch", ["2.6.0", "2.6.0+cu124", "2.11.0", "2.15.0.dev20270101+cu130", "3.0"])
@pytest.mark.parametrize("comfyui", ["0.3.64", "0.3.75", "0.10.0", "0.38.1", "1.0"])
def test_what_is_new_enough(monkeypatch, torch, comfyui):
    assert unmet(monkeypatch, torch, comfyui) == ""


@pytest.mark.parametrize(
    ("torch", "comfyui", "words"),
    [
        ("2.5.1+cu124", "0.3.75", ["torch 2.6 or newer", "2.5.1+cu124"]),
        ("2.11.0", "0.3.63", ["ComfyUI 0.3.64 or newer", "0.3.63"]),
        ("1.13", "0.3", ["torch 2.6", "and ComfyUI 0.3.64"]),
    ],
)
def test_what_is_too_old_is_named(monkeypatch, torch, comfyui, words):
    reason = unmet(monkeypatch, torch, comfyui)
    assert [word for word in words if word not in reason] == []


def test_a_python_that_is_too_old_is_named(monkeypatch):
    assert "Python 3.10 or newer (this is 3.9.18)" in unmet(monkeypatch, "2.6.0", "0.3.64", "3.9.18")
    assert unmet(monkeypatch, "2.6.0", "0.3.64", "3.13.0rc1") == ""


def test_the_versions_here_are_new_enough(comfy):
    assert minimum.unmet() == ""


def test_the_readme_and_the_manifest_say_the_same():
    torch, comfyui = (".".join(map(str, version)) for version in (minimum.TORCH, minimum.COMFYUI))
    assert f'requires-comfyui = ">={comfyui}"' in (ROOT / "pyproject.toml").read_text()
    for name in ("README.md", "README.zh-CN.md"):
        text = (ROOT / name).read_text()
        assert re.search(rf"ComfyUI\D*{re.escape(comfyui)}", text) and re.search(rf"torch {re.escape(torch)}", text), (
            name
        )


def test_a_comfyui_that_is_too_old_starts_without_the_nodes(comfy, tmp_path, monkeypatch, caplog):
    """ComfyUI's own loading of packs, with a copy of this one that asks for a ComfyUI of the future."""
    import nodes

    pack = tmp_path / "AnyShape"
    for folder in ("accel", "nodes", "web"):
        shutil.copytree(ROOT / folder, pack / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "__init__.py", pack)
    asks = (pack / "accel" / "minimum.py").read_text().replace("COMFYUI = (0, 3, 64)", "COMFYUI = (9, 0)")
    (pack / "accel" / "minimum.py").write_text(asks)
    known, before = dict(nodes.NODE_CLASS_MAPPINGS), set(sys.modules)
    monkeypatch.setattr(nodes, "EXTENSION_WEB_DIRS", {})
    with caplog.at_level(logging.INFO):
        assert asyncio.run(nodes.load_custom_node(str(pack)))  # ComfyUI counts no failure
    ours = [name.split("AnyShape.")[-1] for name in sys.modules.keys() - before if "AnyShape" in name]
    assert known == nodes.NODE_CLASS_MAPPINGS and "accel.minimum" in ours and "nodes" not in ours
    assert caplog.text.count("AnyShape needs ComfyUI 9.0 or newer") == 1
    assert "Traceback" not in caplog.text
