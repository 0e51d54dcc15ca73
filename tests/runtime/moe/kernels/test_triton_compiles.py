"""Triton's programs compile to machine code for sm_90 at the sizes of a large model, without a GPU.

Their results are tested in the interpreter (tests/conformance/test_dispatchers.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.runtime.moe.kernels.kernel_choice import has_triton

pytestmark = pytest.mark.skipif(not has_triton(), reason="Triton is not installed: CPU builds of torch bring none")

TILE = {"D": 4096, "TOP_K": 2, "BLOCK_D": 1024}
INTS, SIZE = "*i64", "i32"
#: The arguments, and the compile-time ones. {} stands for the rows' type.
PROGRAMS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "gather_rows": (["{}", INTS, "{}", SIZE], {**TILE, "BLOCK_A": 4}),
    "sum_rows": (["{}", INTS, "*fp32", "{}", SIZE], {**TILE, "WEIGHTED": True, "BLOCK_T": 4}),
    "combine_backward": (["{}", "{}", INTS, "*fp32", "{}", "*fp32", SIZE], {**TILE, "BLOCK_T": 4}),
    "interval_shares": ([INTS] * 4 + [SIZE] * 4, {"BLOCK_N": 64}),
    "order_by_segments": ([INTS] * 5 + [SIZE] * 2, {"LOOKUP": True, "STEPS": 12, "BLOCK": 512}),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_triton_kernel_compiles(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from holdfast.runtime.moe.kernels import triton_jit

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    program, (arguments, constants) = getattr(triton_jit, name), PROGRAMS[name]
    names = program.arg_names
    typed = zip([each for each in names if each not in constants], arguments, strict=True)
    signature = {each: text.format("*bf16") for each, text in typed} | dict.fromkeys(constants, "constexpr")
    pointers = [place for place, each in enumerate(names) if signature[each].startswith("*")]
    source = ASTSource(
        fn=program,
        signature=signature,
        constexprs={(names.index(each),): value for each, value in constants.items()},
        # torch aligns allocations in this way, which permits the widest loads and stores.
        attrs={(place,): [["tt.divisibility", 16]] for place in pointers},
    )
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert made.asm["cubin"]
    if "D" in constants:
        assert "st.global.v4.b32" in made.asm["ptx"], "rows must be written 16 bytes at a time"
