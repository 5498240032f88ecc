"""A release: the version that a tag, pyproject.toml and the changelog agree on, its workflow, and what is sent."""

import io
import json
import os
import re
import socket
import subprocess
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import yaml

from tools import comfy_cli, demo_pack, release
from tools.paths import ROOT, ProjectError

WORKFLOWS = ROOT / ".github" / "workflows"
PYPROJECT = 'version = "1.2.3"\n[project.urls]\nRepository = "https://example.org/anyshape"\n'
CHANGELOG = "# Changelog\n\n## [1.2.3] - 2026-01-31\n\n### Added\n\n- This.\n\n## [1.2.2] - 2026-01-01\n\n- That.\n"


# Versions ---------------------------------------------------------------------------------------------------------


def test_a_good_tag() -> None:
    assert release.problems("v1.2.3", PYPROJECT, CHANGELOG) == []


@pytest.mark.parametrize(
    "tag, pyproject, changelog, what",
    [
        ("v1.2.4", PYPROJECT, CHANGELOG, "The tag is v1.2.4"),
        ("1.2.3", PYPROJECT, CHANGELOG, "The tag is 1.2.3"),
        ("v1.2.3-rc1", PYPROJECT, CHANGELOG, "The tag is v1.2.3-rc1"),
        ("v1.2.3", PYPROJECT, CHANGELOG.replace("[1.2.3]", "[1.2.4]"), "newest version in CHANGELOG.md is 1.2.4"),
        ("v1.2.3", PYPROJECT, CHANGELOG.replace("2026-01-31", "unreleased"), "'unreleased' where the day"),
        ("v1.2.3", 'version = "1.2.3"\n', CHANGELOG, "no Repository"),
    ],
)
def test_a_wrong_tag_is_told(tag: str, pyproject: str, changelog: str, what: str) -> None:
    (found,) = release.problems(tag, pyproject, changelog)
    assert what in found


def test_files_of_another_form_are_told() -> None:
    with pytest.raises(ProjectError, match="pyproject"):
        release.problems("v1.2.3", 'version = "1.2"\n', CHANGELOG)
    with pytest.raises(ProjectError, match="CHANGELOG"):
        release.problems("v1.2.3", PYPROJECT, "## 1.2.3\n")


def test_notes_are_the_newest_part() -> None:
    assert release.notes(CHANGELOG) == "### Added\n\n- This."


def test_this_changelog_begins_with_this_version() -> None:
    newest, date = release.head()
    assert newest == release.version()
    assert date == "unreleased" or release.DATE.fullmatch(date)
    assert len(release.notes()) > 100


# The workflow -----------------------------------------------------------------------------------------------------


def workflow(name: str) -> dict[Any, Any]:
    return yaml.safe_load((WORKFLOWS / name).read_text())


@pytest.fixture(scope="module")
def publishing() -> dict[Any, Any]:
    return workflow("publish.yml")


def commands(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


def test_only_a_tag_publishes_and_only_after_the_checks(publishing) -> None:
    assert publishing[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads the key `on` as true
    jobs = publishing["jobs"]
    assert jobs["publish"]["needs"] == "test" and jobs["test"]["needs"] == "version"
    assert jobs["test"]["uses"] == "./.github/workflows/ci.yml"
    called = workflow("ci.yml")
    assert "workflow_call" in called[True] and commands(called["jobs"]["test"]) == [".ci/run"]
    assert "python3 -m tools.comfy_cli publish" in commands(jobs["publish"])


def test_each_python_of_the_matrix_runs_the_tests() -> None:
    """.ci/run takes the system's Python unless it is told another."""
    (told,) = [step["env"] for step in workflow("ci.yml")["jobs"]["test"]["steps"] if step.get("run") == ".ci/run"]
    assert told == {"PYTHON": "python3"} and '"${PYTHON:-}"' in (ROOT / ".ci/run").read_text()


def test_both_archives_are_kept_for_the_release_page(publishing) -> None:
    (kept,) = [
        step["with"] for step in publishing["jobs"]["publish"]["steps"] if "upload-artifact" in step.get("uses", "")
    ]
    packed = {str(archive.relative_to(ROOT)) for archive in (comfy_cli.ARCHIVE, demo_pack.ARCHIVE)}
    assert set(kept["path"].split()) == packed and "make package" in commands(publishing["jobs"]["publish"])
    assert demo_pack.ARCHIVE.name in (ROOT / "docs/releasing.md").read_text()


@pytest.mark.parametrize("name", ["ci.yml", "publish.yml"])
def test_workflows_may_only_read_and_their_actions_are_pinned(name: str) -> None:
    text = workflow(name)
    assert text["permissions"] == {"contents": "read"}
    assert not [job for job in text["jobs"].values() if "permissions" in job]
    used = re.findall(r"uses: (?!\./)(\S+)", (WORKFLOWS / name).read_text())
    assert used and all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action) for action in used)


def test_only_the_publishing_step_sees_the_key(publishing) -> None:
    with_key = [
        step.get("run")
        for job in publishing["jobs"].values()
        for step in job.get("steps", ())
        if "secrets." in json.dumps(step)
    ]
    assert with_key == ["python3 -m tools.comfy_cli publish"]
    assert (WORKFLOWS / "publish.yml").read_text().count("secrets.") == 1


def test_the_workflow_refuses_another_versions_tag(publishing) -> None:
    """Its own command, as the runner starts it."""
    (command,) = commands(publishing["jobs"]["version"])
    environment = {**os.environ, "GITHUB_REF_NAME": "v99.0.0"}
    done = subprocess.run(["bash", "-ec", command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"The tag is v99.0.0; pyproject.toml has version {release.version()}" in done.stderr


# What is sent -----------------------------------------------------------------------------------------------------


class Registry(BaseHTTPRequestHandler):
    """Answers as the registry does: where to send the archive, and that it came."""

    sent: dict[str, bytes]  # path -> body

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"]))

    def do_POST(self) -> None:
        body = self._body()
        self.sent[self.path] = body
        version = {**json.loads(body)["node_version"], "id": "1", "deprecated": False, "download_url": ""}
        self._answer(201, {"node_version": version, "signedUrl": "http://localhost:8080/upload"})

    def do_PUT(self) -> None:
        self.sent[self.path] = self._body()
        self._answer(200, {})

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    """A registry on this machine, where comfy-cli looks for one if ENVIRONMENT is dev; gives what was sent to it."""
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", 8080)) == 0:
            pytest.skip("something else listens on port 8080, which is the one that comfy-cli wants")
    monkeypatch.setenv("ENVIRONMENT", "dev")
    monkeypatch.setenv("NO_PROXY", "localhost")
    monkeypatch.setattr(Registry, "sent", {}, raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 8080), Registry) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Registry.sent
        server.shutdown()


@pytest.mark.skipif(not comfy_cli.ready() and not os.environ.get("CI"), reason=comfy_cli.MISSING)
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="comfy-cli packs what git tracks")
def test_the_registry_gets_the_archive_and_the_changelog(registry, monkeypatch) -> None:
    monkeypatch.setenv(comfy_cli.TOKEN, "a-key")
    comfy_cli.publish()
    body = json.loads(registry["/publishers/anyshape/nodes/anyshape/versions"])
    assert body["personal_access_token"] == "a-key"
    assert body["node_version"]["version"] == release.version()
    assert body["node_version"]["changelog"] == release.notes()
    assert body["node"]["name"] == "AnyShape" and body["node"]["supported_os"] == ["OS Independent"]
    with zipfile.ZipFile(comfy_cli.pack()) as packed, zipfile.ZipFile(io.BytesIO(registry["/upload"])) as uploaded:
        assert packed.namelist() == uploaded.namelist()
    assert not comfy_cli.PACKED.exists()


def test_without_a_key_nothing_is_published(monkeypatch) -> None:
    monkeypatch.delenv(comfy_cli.TOKEN, raising=False)
    with pytest.raises(ProjectError, match=comfy_cli.TOKEN):
        comfy_cli.publish()
