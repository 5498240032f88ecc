"""What must be true of a release: its tag, pyproject.toml and the changelog name one version.

    python3 -m tools.release v0.1.0         # exit code 1 and the reasons, if it is not

Standard library only, Python 3.10 or newer (which has no TOML reader yet).
"""

import re
import sys

from tools.paths import ROOT, ProjectError

VERSION = r"\d+\.\d+\.\d+"
HEAD = re.compile(rf"^## \[({VERSION})\] - (.+)$", re.MULTILINE)
DATE = re.compile(r"\d{4}-\d{2}-\d{2}")


def version(pyproject: str | None = None) -> str:
    """The version in pyproject.toml (or in its text)."""
    found = re.search(rf'^version = "({VERSION})"$', _text("pyproject.toml", pyproject), re.MULTILINE)
    if not found:
        raise ProjectError('pyproject.toml has no line such as version = "1.2.3"')
    return found[1]


def head(changelog: str | None = None) -> tuple[str, str]:
    """The newest version in CHANGELOG.md (or in its text) and its date, or "unreleased"."""
    found = HEAD.search(_text("CHANGELOG.md", changelog))
    if not found:
        raise ProjectError("CHANGELOG.md has no heading such as ## [1.2.3] - 2026-01-31")
    return found[1], found[2]


def notes(changelog: str | None = None) -> str:
    """The newest version's part of CHANGELOG.md, without its heading."""
    text = _text("CHANGELOG.md", changelog)
    parts = [match for match in HEAD.finditer(text)]
    if not parts:
        raise ProjectError("CHANGELOG.md has no version.")
    return text[parts[0].end() : parts[1].start() if len(parts) > 1 else None].strip()


def problems(tag: str, pyproject: str | None = None, changelog: str | None = None) -> list[str]:
    """Why a tag must not be released, in plain words; the two files are read where their texts are not given."""
    project, (newest, date) = version(pyproject), head(changelog)
    found = []
    if tag != f"v{project}":
        found.append(f"The tag is {tag}; pyproject.toml has version {project}, whose tag is v{project}.")
    if newest != project:
        found.append(f"The newest version in CHANGELOG.md is {newest}; pyproject.toml has {project}.")
    if not DATE.fullmatch(date):
        found.append(f"CHANGELOG.md has {date!r} where the day of the release belongs: 2026-01-31.")
    if not re.search(r'^Repository = "https://[^"]+"$', _text("pyproject.toml", pyproject), re.MULTILINE):
        found.append("pyproject.toml has no Repository under [project.urls]; the registry asks for it.")
    return found


def _text(name: str, given: str | None) -> str:
    return (ROOT / name).read_text(encoding="utf-8") if given is None else given


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("Name the tag: python3 -m tools.release v1.2.3")
    try:
        wrong = problems(sys.argv[1])
    except ProjectError as problem:
        wrong = [str(problem)]
    if wrong:
        sys.exit("\n".join(wrong))
    print(f"{sys.argv[1]} is pyproject.toml's version and the newest of CHANGELOG.md.")
