"""What tests need of Debian's packages is waited for while it is installed."""

import subprocess
import sys
import time

import pytest

from tools import browser, debian
from tools.paths import ROOT

HOLDS = """
import sys, time
from pathlib import Path
from tools import debian
with Path(sys.argv[1]).open("w") as file, debian._locked(file, "LOCK_EX"):
    print("held", flush=True)
    time.sleep(0.5)
    Path(sys.argv[2]).touch(0o755)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="nothing is installed there")
def test_a_browser_is_found_once_it_is_installed(tmp_path, monkeypatch):
    lock, program = tmp_path / "lock", tmp_path / "chromium"
    monkeypatch.setattr(debian, "LOCK", lock)
    monkeypatch.setenv("CHROMIUM", str(program))
    assert browser.find() is None  # nobody installs one
    installer = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(lock), str(program)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert installer.stdout.readline() == "held\n"
    started = time.monotonic()
    assert browser.find() == program and time.monotonic() - started > 0.2
    assert installer.wait() == 0
    assert browser.find() == program  # and nobody waits for a lock that is left
