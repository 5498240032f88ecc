"""What other files test of models that only the newer ComfyUI has: in one process, because its start takes long."""

from tools import architectures


def test_models_of_a_newer_comfyui(in_newer_comfyui):
    names = [entry.name for entry in architectures.changed()]
    assert "Krea2" in names and "Flux" in names and "SD15" not in names
    tests = ["test_architectures.py::test_every_model_of_comfyui_is_in_the_table"]
    tests += [f"test_architectures.py::test_model_runs_at_every_size[{name}]" for name in names]
    tests += ["test_tape_blocks.py::test_blocks_of_minimax_h3"]
    result = in_newer_comfyui(*(f"tests/{test}" for test in tests))
    assert result.returncode == 0 and f"{len(tests)} passed" in result.stdout, result.stdout[-4000:]
