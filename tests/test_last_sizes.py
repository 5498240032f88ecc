"""The file of sizes that outlives a process: what it keeps, and what it makes of a file that is not its own."""

import json

import pytest
from anyshape.accel.last_sizes import MAX_BYTES, MAX_MODELS, MAX_SIZES, LastSizes
from anyshape.accel.size_list import Shape

A, B, VIDEO = Shape(64, 64), Shape(512, 768, 4), Shape(832, 480, 1, 33)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "user" / "__anyshape" / "sizes.json"


def session(file, **models):
    """A process that notes these sizes."""
    kept = LastSizes(file)
    assert all([kept.note(model, sizes) for model, sizes in models.items()])
    kept.save()
    return kept


def test_each_model_keeps_its_own_last_session(file):
    assert LastSizes(file).last("xl") == []
    first = session(file, xl=[A, B], wan=[VIDEO])
    assert first.last("xl") == [], "the last session is the one before this"
    assert LastSizes(file).last("xl") == [A, B] and LastSizes(file).last("wan") == [VIDEO]
    session(file, xl=[B])
    assert LastSizes(file).last("xl") == [B] and LastSizes(file).last("wan") == [VIDEO]
    assert [one.name for one in file.parent.iterdir()] == ["sizes.json"]


def test_what_is_known_is_no_news(file):
    kept = LastSizes(file)
    assert kept.note("xl", [A]) and not kept.note("xl", [A]) and kept.note("xl", [A, B])
    assert not kept.note("", [A]) and not kept.note("xl", [])


def test_two_processes_at_once(file):
    """Each writes its own models."""
    one, two = LastSizes(file), LastSizes(file)
    one.note("a", [A])
    two.note("b", [B])
    one.save()
    two.save()
    assert LastSizes(file).last("a") == [A] and LastSizes(file).last("b") == [B]


def test_it_stays_small(file):
    many = [Shape(64, 8 * n) for n in range(8, 8 + 2 * MAX_SIZES)]
    session(file, **{f"m{n}": many for n in range(MAX_MODELS)})
    session(file, last=[A])
    found = json.loads(file.read_text())["models"]
    assert list(found) == [*(f"m{n}" for n in range(1, MAX_MODELS)), "last"] and found["last"] == ["64x64"]
    assert LastSizes(file).last(f"m{MAX_MODELS - 1}") == many[-MAX_SIZES:]


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "7", '{"version": 2, "models": {"xl": ["64x64"]}}', '{"version": 1, "models": []}',
     '{"version": 1, "models": {"xl": {"64x64": 1}}}', '{"version": 1, "models": {"xl": [7, null, "no size"]}}',
     "[" * 100_000, "\xff\xfe", " " * (MAX_BYTES + 1)],
    ids=lambda content: content[:30].strip() or "blank",
)  # fmt: skip
def test_a_file_that_is_not_ours(file, content):
    file.parent.mkdir(parents=True)
    file.write_text(content, encoding="latin-1")
    assert LastSizes(file).last("xl") == []
    session(file, xl=[A])
    assert LastSizes(file).last("xl") == [A]
