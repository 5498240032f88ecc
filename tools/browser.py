"""A Chromium for the tests in a browser: where it is, how to get one, and how it must be started here.

    python3 -m tools.browser        # on a machine of its own (CI): installs one if there is none; never fails

Standard library only. Playwright drives whatever is found; it downloads no browser of its own.
"""

import os
import shutil
from pathlib import Path

from tools import debian

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# The last one has the Chinese letters of the screenshots.
PACKAGES = ("chromium", "fonts-wqy-microhei")
# Without these a headless Chromium asks for a display card, for its maker's hosts, and as root for a sandbox.
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
MISSING = (
    "no Chromium was found. Install one (apt-get install chromium), or name one: CHROMIUM=/path/to/chromium make test"
)


def find() -> Path | None:
    """The browser: CHROMIUM if that is set, else what is installed. Waits for packages that are being installed."""
    debian.wait()
    named = os.environ.get("CHROMIUM")
    found = next((path for name in ([named] if named else NAMES) if (path := shutil.which(name))), None)
    return Path(found) if found else None


def install() -> str:
    """Installs a browser with apt-get where that is possible; "" or why there is still none."""
    if find():
        return ""
    problem = debian.install(*PACKAGES)
    return "" if find() else f"{MISSING}. {problem}"


if __name__ == "__main__":
    problem = install()
    print(f"[browser] {find()}" if not problem else f"[browser] The tests in a browser will be skipped: {problem}")
