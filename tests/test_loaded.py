"""Kernels get what Triton compiled them to take, and no C compiler is needed. Machine code for an H100; no card.

Where kernels are interpreted, ``test_compile_helpers`` runs this file in another process, in which they are not.
"""

import ctypes
import re
import struct

import pytest
import torch

triton = pytest.importorskip("triton")

from anyshape.accel.kernels import compiling, cuda_driver, geglu_upsample, launch, linear_geglu, loaded  # noqa: E402
from anyshape.accel.kernels.from_text import module_of  # noqa: E402
from triton import knobs  # noqa: E402

from tools import compile_kernels  # noqa: E402

SIZES = {"u8": 1, "u16": 2, "u32": 4, "u64": 8, "f32": 4, "f64": 8, "b8": 1}
OF_ALL_KINDS = """import triton
import triton.language as tl


@triton.jit(do_not_specialize=["wide", "narrow"])
def of_all_kinds(x, narrow, wide, one, small, large: tl.float64, out, BC: tl.constexpr):
    i = tl.arange(0, BC)
    tl.store(out + i, tl.load(x + i + wide) * small + large * narrow + one)
"""
compiling_here = pytest.mark.skipif(knobs.runtime.interpret, reason="runs in a process in which nothing is interpreted")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache of Triton's, and a card that is asked for nothing but its capability."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    forget = compiling._without_driver.cache_clear
    forget()
    yield
    forget()


def of_machine_code(compiled):
    """The size in bytes of each parameter of a kernel, as Triton's own text of the machine code has them."""
    head = re.search(r"\.entry \w+\((.*?)\n\)", compiled.asm["ptx"], re.S)[1]
    found = re.findall(r"\.param (?:\.align \d+ )?\.(\w+)\b[^,\[]*(?:\[(\d+)\])?", head)
    return [SIZES[kind] * int(count or 1) for kind, count in found]


class Started(list):
    """In place of a card, on which nothing is started: (grid, threads, shared memory, stream, the arguments' bytes)."""

    def load(self, compiled):
        self.parameters = of_machine_code(compiled)
        return loaded.Loaded(compiled, 0)

    def start(self, function, grid, threads, shared, stream, places):
        given = [ctypes.string_at(place, size) for place, size in zip(places, function, strict=True)]
        self.append((grid, threads, shared, stream, given))


@pytest.fixture
def started(monkeypatch):
    started = Started()
    monkeypatch.setattr(loaded, "_address", lambda tensor: tensor.data_ptr())
    monkeypatch.setattr(cuda_driver, "load", lambda *_: started.parameters)
    monkeypatch.setattr(cuda_driver, "parameters", lambda function: function)
    monkeypatch.setattr(cuda_driver, "start", started.start)
    return started


@compiling_here
@pytest.mark.parametrize("kernel", compile_kernels.KERNELS, ids=lambda kernel: kernel.__name__)
def test_parameters_are_those_of_the_machine_code(started, kernel):
    """Pointers, numbers, descriptors of tensors, and what Triton adds: where C has them. Else it would not load."""
    assert started.load(compile_kernels.compile_for(kernel, 90))._struct.size > 0


@compiling_here
def test_arguments_are_where_they_belong(started, monkeypatch):
    """What is 1 is a constant. Neither a C compiler is asked nor a driver: this compiles on any machine."""
    monkeypatch.setattr("triton.runtime.build._build", lambda *_: pytest.fail("a C compiler was asked"))
    kernel = module_of(OF_ALL_KINDS, "of_all_kinds").of_all_kinds
    x, out = torch.zeros(64), torch.zeros(64)
    args = (x, -5, 1 << 40, 1, 0.1, 1e300, out, 64)
    ready = started.load(compiling.compiled(kernel, 0, args, (1,), {"num_warps": 2}))
    ready((3, 2, 1), args, 77)
    ((grid, threads, shared, stream, given),) = started
    assert (grid, threads, stream) == ((3, 2, 1), 64, 77) and shared == ready.compiled.metadata.shared
    numbers = [int.from_bytes(each, "little", signed=True) for each in given]
    assert numbers[:3] == [x.data_ptr(), -5, 1 << 40] and numbers[5] == out.data_ptr() and not any(numbers[6:])
    assert [struct.unpack("f", given[3])[0], struct.unpack("d", given[4])[0]] == [
        pytest.approx(0.1), 1e300,
    ]  # fmt: skip
    with pytest.raises(RuntimeError, match="cannot take"):
        ready((1, 1, 1), (x, 1 << 31, *args[2:]), 0)
    ready((1, 0, 1), args, 0)
    assert len(started) == 1, "an empty grid starts nothing"


@compiling_here
@pytest.mark.parametrize(("options", "contracts"), [({}, True), ({"enable_fp_fusion": False}, False)])
def test_whether_products_and_sums_contract_is_not_left_to_triton(started, monkeypatch, options, contracts):
    """Its versions differ in that, and the environment may say so."""
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    kernel = module_of(OF_ALL_KINDS, "of_all_kinds").of_all_kinds
    made = compiling.compiled(kernel, 0, (torch.zeros(64), 2, 3, 4, 0.1, 0.2, torch.zeros(64), 64), (1,), options)
    assert made.metadata.enable_fp_fusion is contracts


@compiling_here
def test_descriptors_become_maps(started, monkeypatch):
    from triton.tools.tensor_descriptor import TensorDescriptor

    maps = []
    monkeypatch.setattr(cuda_driver, "tensor_map", lambda *what: maps.append(what) or bytes([len(maps)]) * 128)
    ready = started.load(compile_kernels.compile_for(linear_geglu.linear_geglu_kernel, 90))
    x, weight, out = (torch.zeros(*shape, dtype=torch.float16) for shape in ((96, 320), (2, 640, 320), (96, 640)))
    described = [TensorDescriptor.from_tensor(each, block) for each, block in
                 ((x, [64, 64]), (weight, [2, 128, 64]), (out, [64, 128]))]  # fmt: skip
    ready((1, 1, 1), (*described[:2], x, described[2], 96, 640, 320, True, 64, 128, 64, 8), 0)
    given = started[0][-1]
    assert [each[:1] for each in given if len(each) == 128] == [b"\1", b"\2", b"\3"]
    assert [int.from_bytes(each, "little") for each in given[6:12]] == [2, 640, 320, 640 * 320, 320, 1]
    assert [what[0] for what in maps] == [each.data_ptr() for each in (x, weight, out)]
    half = 6  # of CUtensorMapDataType
    assert [(what[1], what[2], list(what[4])) for what in maps] == [
        (half, 2, [96, 320]), (half, 2, [2, 640, 320]), (half, 2, [96, 640]),
    ]  # fmt: skip


@compiling_here
def test_threads_that_start_one_kernel(started):
    from tools.driving import in_threads

    block = geglu_upsample.GEGLU_BLOCK
    p, out = torch.zeros(4, dtype=torch.float16), torch.zeros(2, dtype=torch.float16)
    ready = started.load(compiling.compiled(geglu_upsample.geglu_kernel, 0, (p, out, 17, 33, *block), (1,), {}))
    in_threads(lambda rows: [ready((1, 1, 1), (p, out, rows, 33, *block), rows) for _ in range(200)], range(8))
    assert len(started) == 8 * 200
    assert all(int.from_bytes(given[2], "little") == stream for *_, stream, given in started)


@compiling_here
def test_what_is_not_known_is_not_started(started, monkeypatch):
    """Another Triton may add a parameter, or give its kernels memory. The message says which kernel."""
    compiled = compile_kernels.compile_for(geglu_upsample.geglu_kernel, 90)
    metadata = compiled.metadata
    compiled.metadata = metadata._replace(global_scratch_size=64)
    with pytest.raises(RuntimeError, match="geglu_kernel needs"):
        started.load(compiled)
    compiled.metadata = metadata
    monkeypatch.setattr(cuda_driver, "parameters", lambda function: [*function, 8])
    with pytest.raises(RuntimeError, match="gave geglu_kernel parameters"):
        started.load(compiled)
    monkeypatch.setattr(cuda_driver, "parameters", lambda function: None)  # of a driver that does not tell
    assert started.load(compiled)


def test_a_tensor_that_is_not_on_the_card():
    with pytest.raises(RuntimeError, match="on cpu"):
        loaded._address(torch.zeros(1))


@pytest.mark.parametrize("error", [OSError("libcuda.so.1: cannot open"), AttributeError("no device_caches")])
def test_what_cannot_be_compiled_or_loaded(monkeypatch, error):
    """No driver, or another Triton: a kernel that failed, in whose place torch's operations run."""
    from anyshape.accel.errors import KernelFailed

    def fails(*_):
        raise error

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launch, "compiled", fails)
    with pytest.raises(KernelFailed, match=f"geglu_kernel.*{error}"):
        launch.compile_only(geglu_upsample.geglu_kernel, (1,), torch.float16, torch.float16, 16, 16)


@compiling_here
def test_where_triton_compiles_in_another_way(monkeypatch):
    """It is called as it is, and may ask its own driver."""
    asked = []

    def run(self, *args, grid, warmup, **options):
        asked.append((grid, warmup, options))
        return "compiled"

    monkeypatch.setattr(triton.JITFunction, "run", run)
    kernel = module_of(OF_ALL_KINDS, "of_all_kinds").of_all_kinds
    assert compiling.compiled(kernel, 0, (1,), (2,), {"num_warps": 8}) == "compiled"
    assert asked == [((2,), True, compiling.FUSION | {"num_warps": 8})]


@pytest.mark.parametrize("interpreted", [True, False])
def test_the_oldest_triton_says_by_its_variable_whether_it_interprets(monkeypatch, interpreted):
    from anyshape.accel.tape import kernels

    assert kernels._interpreted() == knobs.runtime.interpret
    monkeypatch.delattr(triton, "knobs")
    monkeypatch.setenv("TRITON_INTERPRET", str(int(interpreted)))
    assert kernels._interpreted() == interpreted
