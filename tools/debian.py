"""Debian packages that some tests need, installed where that is possible. Standard library only."""

import os
import shutil
import subprocess


def install(*packages: str) -> str:
    """Installs with apt-get, without starting services; "" or why it could not."""
    if not shutil.which("apt-get") or os.geteuid() != 0:
        return "It is not installed by itself: that takes apt-get, as root."
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}  # services are not started
    install = ["install", "-y", "-q", "--no-install-recommends", *packages]
    for command in (install, ["update", "-q"], install):  # the lists may be there, and of today
        done = subprocess.run(["apt-get", *command], capture_output=True, text=True, env=env)
        if command is install and not done.returncode:
            return ""
    return f"apt-get install failed: {done.stderr.strip()[-500:]}"
