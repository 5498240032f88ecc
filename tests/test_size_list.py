"""Sizes as people write them, for Warm Up: lines, several on one, frames, presets, and what is no size."""

import pytest

from tools.warming import FORMS


def parse(text):
    from anyshape.accel.size_list import parse

    shapes, problems = parse(text)
    return [(s.width, s.height, s.batch) for s in shapes if s.frames == 1], problems


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("1024x1152", (1024, 1152, 1)), ("896x768 batch 2", (896, 768, 2)), ("  896 X 768   Batch 02 ", (896, 768, 2)),
        ("16x16384 batch 4096", (16, 16384, 4096)), ("512×768 # tall", (512, 768, 1)), ("1023x727", (1016, 720, 1)),
    ],
)  # fmt: skip
def test_a_size(pack, line, wanted) -> None:
    assert parse(line) == ([wanted], [])


@pytest.mark.parametrize(
    "line",
    ["1024y1152", "1024", "1024x", "x1152", "1024x1152x", "1024x1152x2x2", "1024x1152 2", "1024x1152 frames",
     "1024x1152 batch 2 33 frames", "1024x1152x2 33 frames", "1024x1152 batch", "1024x1152 batch two", "1024x1152b2",
     "-1024x1152", "1024.5x1152", "1e3x1152", "1024x1152 batch -1", "a square", "1024x1152, 512", "1024*1152**2",
     "9" * 5000 + "x64", "١٠٢٤x512"],
)  # fmt: skip
def test_not_a_size(pack, line) -> None:
    found, (problem,) = parse(f"\n# sizes\n{line}\n512x512")
    assert found == [(512, 512, 1)]
    assert problem.startswith("line 3: '") and problem.endswith(FORMS)
    assert line[:40] in problem and len(problem) < 180


@pytest.mark.parametrize(
    "line",
    ["64*72 b2", "64 x 72, batch 2", "64x72 B2,", "64X72  b 2;", "６４ｘ７２　ｂａｔｃｈ２", "64×72，ｂ2"],
)  # fmt: skip
def test_a_size_as_people_write_it(pack, line) -> None:
    assert parse(line) == ([(64, 72, 2)], [])


def test_several_sizes_on_a_line(pack) -> None:
    wanted = [(64, 64, 1), (128, 128, 2), (72, 64, 1)]
    for line in ("64x64, 128x128 batch 2, 72x64", "64*64;128*128 b2 ;72*64", "６４ｘ６４，１２８ｘ１２８ b2、72x64"):
        assert parse(line) == (wanted, []), line
    found, problems = parse("512x512\n64x64, 8x8, 72x, 80x80")
    assert found == [(512, 512, 1), (64, 64, 1), (80, 80, 1)]
    assert [problem.split(" - ")[0] for problem in problems] == ["line 2: '8x8'", "line 2: '72x'"]


def test_a_bad_entry_leaves_the_others_of_its_line(pack) -> None:
    for line in ("64x64, foo", "foo, 64x64", "64x64; Foo", "６４ｘ６４、foo"):
        found, problems = parse(line)
        assert found == [(64, 64, 1)], line
        assert [problem.split(" - ")[0].lower() for problem in problems] == ["line 1: 'foo'"]
    assert parse("64x64, bar, 72x72, b2")[0] == [(64, 64, 1), (72, 72, 2)]
    for line in ("64x64, batch two", "64x64, 512"):  # what could belong to the size is no other entry
        found, (problem,) = parse(line)
        assert found == [] and f"'{line}'" in problem


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("8x512", "the width is 8; give 16 to 16384 pixels"), ("512x16385", "the height is 16385; give 16"),
        ("0x0", "the width is 0"), ("512x512 batch 0", "the batch is 0; give 1 to 4096 images"),
        ("512x512 batch 4097", "the batch is 4097"), ("832x480x0", "the frames are 0; give 1 to 16384"),
        ("832x480 16385 frames", "the frames are 16385"),
    ],
)  # fmt: skip
def test_a_size_that_comfyui_does_not_make(pack, line, words) -> None:
    found, (problem,) = parse(line)
    assert found == [] and problem.startswith(f"line 1: '{line}' - ") and words in problem


@pytest.mark.parametrize(
    ("line", "wanted", "shown"),
    [
        ("832x480x33", (832, 480, 1, 33), "832x480x33"), ("832 × 480 X 33 # short", (832, 480, 1, 33), "832x480x33"),
        ("832x480 33 frames", (832, 480, 1, 33), "832x480x33"), ("64x64 1 frame", (64, 64, 1, 1), "64x64"),
        ("832x480x5 batch 2", (832, 480, 2, 5), "832x480x5 batch 2"),
        ("839x480 5 Frames Batch 2", (832, 480, 2, 5), "832x480x5 batch 2"),
    ],
)  # fmt: skip
def test_frames_of_a_video(pack, line, wanted, shown) -> None:
    from anyshape.accel.size_list import parse

    ((found,), problems) = parse(line)
    assert (found.width, found.height, found.batch, found.frames) == wanted
    assert str(found) == shown and problems == []


def test_presets_add_their_sizes_to_the_list(pack) -> None:
    from anyshape.accel.size_list import PRESETS, with_preset

    assert parse(with_preset("64x64\nx", "none")) == parse("64x64\nx")
    found, problems = parse(with_preset("1024x1024 batch 2\nx", "SDXL"))
    assert len(found) == 10 and found[0] == (1024, 1024, 2) and len(problems) == 1
    assert all(0.9 < width * height / 1024**2 < 1.1 for width, height, _ in found)
    assert all(parse(sizes)[1] == [] for sizes in PRESETS.values())
    with pytest.raises(ValueError, match="preset is 'sdxl'; choose one of none, SDXL"):
        with_preset("", "sdxl")


def test_blank_lines_comments_and_repetitions(pack) -> None:
    assert parse("\n# all\n512x512\r\n\t\n512x512 batch 1\n515x519\n512x512 batch 2 # more\n") == (
        [(512, 512, 1), (512, 512, 2)], [],
    )  # fmt: skip
    assert parse("") == parse(" \n#512x512") == ([], [])


def test_comfyui_makes_the_same_size(models) -> None:
    """Of a size that is no multiple of 8; the report says so."""
    from anyshape.accel.comfy.latents import latents_of
    from anyshape.accel.size_list import parse
    from comfy.latent_formats import SD15

    import nodes

    ((shape,), _) = parse("1023x729 batch 3")
    latent = nodes.EmptyLatentImage().generate(1023, 729, 3)[0]["samples"]
    assert tuple(latent.shape) == latents_of(SD15()).shape(shape.width, shape.height, shape.batch)
    assert shape.note.startswith("line 1: '1023x729 batch 3' - taken as 1016x728: ")


# The table --------------------------------------------------------------------------------------------------------


def test_the_table_has_the_words_of_users_and_each_sentence_once(pack) -> None:
    from anyshape.accel.reasons import say
    from anyshape.accel.size_list import Row, Shape, table

    full, other = say("budget_full", budget=2048), "taken as 64x72"
    rows = [
        Row(Shape(64, 64), "model", "graph", 1.5, 3 << 20, factor=1.25, speed="fast"),
        Row(Shape(64, 72), "model", "tape", 0.5, why=other, speed="partly fast", told=(("UNet", full), ("", other))),
        Row(Shape(72, 72), "VAE decode", "not run", why=full),
    ]
    _, first, second, third, *below = table(rows).splitlines()
    assert first.split() == ["64x64", "1", "model", "fast", "(graph)", "1.50", "1.25", "3"]
    assert " partly fast (tape) " in second and second.split(")")[1].split()[:3] == ["0.50", "-", "-"]
    assert second.endswith(f"  {other}; UNet: Raise graph_budget_mb: it is full")
    assert " not run " in third and third.endswith("  -     -      -  Raise graph_budget_mb: it is full")
    assert below == [f"  {full}"]
