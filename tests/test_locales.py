"""The texts that the frontend shows in each language, and the nodes' help pages: complete, current and served."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tools.paths import ROOT

LANGUAGES = ("en", "zh")
FORMATTING = re.compile(r"[@{}|]")  # the frontend's translator gives these a meaning of their own
NODE_IDS = (
    "AnyShapeAccelerate",
    "AnyShapeCompileModel",
    "AnyShapeCompileVAE",
    "AnyShapeCompileControlNet",
    "AnyShapeSkipBlocks",
    "AnyShapeWarmUp",
    "AnyShapeShapeCacheInfo",
)


def translation(language: str) -> dict[str, Any]:
    return json.loads((ROOT / "locales" / language / "nodeDefs.json").read_text(encoding="utf-8"))


def described(schema: Any) -> dict[str, Any]:
    """What nodeDefs.json must hold for a node: its texts, as its schema gives them."""
    return {
        "display_name": schema.display_name,
        "description": schema.description,
        "inputs": {i.id: {"name": i.display_name or i.id, "tooltip": i.tooltip} for i in schema.inputs},
        "outputs": {
            str(index): {"name": o.display_name or o.io_type, "tooltip": o.tooltip}
            for index, o in enumerate(schema.outputs)
        },
    }


def leaves(tree: dict[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Every text of a nested dict with the path that leads to it."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{path}{key}/")
        else:
            yield path + key, value


@pytest.fixture(scope="module")
def schemas(pack) -> dict[str, Any]:
    """Every node of the pack, by its id, as `described`."""
    found = [node.define_schema() for node in pack.nodes.NODES]
    return {schema.node_id: described(schema) for schema in found}


def test_all_nodes_are_covered(schemas) -> None:
    assert set(schemas) == set(NODE_IDS), "NODE_IDS of this file names the nodes whose help pages are looked for"


@pytest.mark.parametrize("language", LANGUAGES)
def test_no_key_is_missing_or_extra(schemas, language) -> None:
    wanted, found = (dict(leaves(tree)) for tree in (schemas, translation(language)))
    assert not sorted(wanted.keys() - found.keys()), "missing"
    assert not sorted(found.keys() - wanted.keys()), "no node has this"


def test_english_says_what_the_schema_says(schemas) -> None:
    """The frontend prefers the file, so a text changed in the schema alone would never be seen."""
    assert translation("en") == schemas


@pytest.mark.parametrize("language", LANGUAGES)
def test_texts_are_texts(language) -> None:
    wrong = {path: text for path, text in leaves(translation(language)) if not text or FORMATTING.search(text)}
    assert not wrong


def test_chinese_is_chinese() -> None:
    """A text that was only copied has none of the script; a name such as VAE may stay."""
    han = re.compile(r"[\u4e00-\u9fff]")
    copied = [path for path, text in leaves(translation("zh")) if not han.search(text) and text != "VAE"]
    assert not copied


@pytest.mark.parametrize("node_id", NODE_IDS)
def test_help_pages_name_every_input(schemas, node_id) -> None:
    for page in (f"{node_id}.md", f"{node_id}/zh.md"):
        text = (ROOT / "web" / "docs" / page).read_text(encoding="utf-8")
        assert text.startswith("# "), page
        assert not [name for name in schemas[node_id]["inputs"] if f"`{name}`" not in text], page


SECTIONS = {
    "en": ("When to use it", "When not to use it", "Inputs", "Output", "Troubleshooting"),
    "zh": ("适合的情况", "不适合的情况", "输入", "输出", "常见问题"),
}
MOST_BYTES = 40_000  # of a picture


def help_page(node_id: str, language: str) -> str:
    name = f"{node_id}.md" if language == "en" else f"{node_id}/{language}.md"
    return (ROOT / "web" / "docs" / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("node_id", NODE_IDS)
def test_help_pages_have_every_section_and_a_picture(node_id, language) -> None:
    text = help_page(node_id, language)
    places = [text.find(f"\n## {title}") for title in SECTIONS[language]]
    assert -1 not in places and places == sorted(places)
    (named,) = re.findall(r"!\[[^\]]+\]\((\S+)\)", text)
    assert named == f"assets/{node_id}.{language}.png"
    assert 0 < (ROOT / "web" / "docs" / named).stat().st_size < MOST_BYTES


# How a row of docs/troubleshooting.md begins, and what begins the answer on the help pages that it names, by language.
COMPLAINTS = {
    "Everything compiles again": ("It compiles again", "换了尺寸、提示词或批量就重新编译"),
    "`recompile_limit`": ('"recompile_limit", "cache_size_limit"', "日志里出现 “recompile_limit”"),
    "A LoRA has no effect": ("A LoRA has no effect", "LoRA 不起作用"),
    "Triton is missing": ('"Triton cannot be imported"', "“无法导入 Triton”"),
    "Out of memory": ("Out of memory", "显存不足"),
    "Black, noisy": ("The picture is black", "图像发黑"),
    "A VAE is compiled": ("Workflow A with the node", "工作流 A 用此节点"),
    "DeepCache or another step cache": ("An error or a wrong picture at an odd size", "奇数尺寸"),
    "A step cache (TeaCache": ("Together with TeaCache", "与 TeaCache"),
    "*Weights streamed": ('"weights streamed: of', "“权重随用随载”"),
}


def test_help_pages_answer_what_users_complain_about() -> None:
    lines = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8").splitlines()
    for complaint, quoted in COMPLAINTS.items():
        (row,) = [line for line in lines if line.startswith(f"| {complaint}")]
        assert row.count(" | ") == 2 and (node_ids := re.findall(r"/(AnyShape\w+)\.md", row)), row
        for node_id in node_ids:
            for language, words in zip(LANGUAGES, quoted, strict=True):
                _, answers = help_page(node_id, language).split(f"\n## {SECTIONS[language][-1]}")
                assert f"- **{words}" in answers, (complaint, node_id, language)


@pytest.mark.parametrize("node_id", NODE_IDS)
def test_help_pages_are_served(server, node_id) -> None:
    """Where the frontend asks for them first, in every language: without a 404, which a browser's console shows."""
    pages = {"en": f"{node_id}.md", "fr": f"{node_id}.md", "zh": f"{node_id}/zh.md", "zh-TW": f"{node_id}/zh.md"}
    for language, page in pages.items():
        served = server.get(f"/extensions/AnyShape/docs/{node_id}/{language}.md")
        assert served.content == (ROOT / "web" / "docs" / page).read_bytes()
        assert served.headers["Content-Type"].startswith("text/markdown")


def test_only_help_pages_are_served_so(server) -> None:
    for address in ("AnyShapeNothing/en.md", "AnyShapeWarmUp/..%2F..%2F..%2FREADME.md", "AnyShapeWarmUp/%2E%2E.md"):
        assert server.http.get(f"{server.url}/extensions/AnyShape/docs/{address}").status_code == 404


def test_translations_are_served(server) -> None:
    served = server.get("/i18n").json()
    for language in LANGUAGES:
        mine = {name: node for name, node in served[language]["nodeDefs"].items() if name in NODE_IDS}
        assert mine == translation(language)
