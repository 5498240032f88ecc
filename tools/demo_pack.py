"""The demo as an archive of its own, for people who have AnyShape without its repository: `make package`.

    python3 -m tools.demo_pack

Unpacked into custom_nodes it is a node pack with two small trained models and one template. Standard library only.
"""

import zipfile
from pathlib import Path

from tools.paths import CACHE, ROOT

DEMO, ARCHIVE = ROOT / "demo", CACHE / "package" / "anyshape_demo.zip"
FOLDER = "anyshape_demo"  # in custom_nodes
MODULES = ("__init__.py", "nodes.py", "model.py", "text.py")
FILES = (*MODULES, "emoji.safetensors", "emoji_transformer.safetensors", "LICENSE-emoji.txt")
DATE = (2026, 1, 1, 0, 0, 0)  # the same files make the same archive


def files() -> list[tuple[Path, str]]:
    """(where it lies, its name in the archive)."""
    found = [DEMO / name for name in FILES] + sorted((DEMO / "example_workflows").iterdir())
    return [(path, f"{FOLDER}/{path.relative_to(DEMO).as_posix()}") for path in found] + [
        (ROOT / "LICENSE", f"{FOLDER}/LICENSE")
    ]


def pack() -> Path:
    """Writes the archive."""
    ARCHIVE.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(ARCHIVE, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, name in files():
            archive.writestr(zipfile.ZipInfo(name, DATE), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return ARCHIVE


if __name__ == "__main__":
    made = pack()
    print(f"[package] The demo: {len(files())} files, {made.stat().st_size / 1e6:.1f} MB: {made.relative_to(ROOT)}")
