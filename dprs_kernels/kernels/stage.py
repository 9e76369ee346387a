"""stage: copies the rows that 128-bit loads cannot read (odd sizes, odd strides) into an aligned scratch.

For the biases of a model, a fraction of a per cent of the values; backends/triton.py reads a large odd parameter
where it lies instead.

stage table, int64 [params, 4]:  address, distance between samples in values, values, first column in the scratch
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["samples", "width"])
def _stage_rows_kernel(
    scratch_ptr, stage_ptr, samples, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HELD: tl.constexpr
):
    """scratch[row, column + j] = g[row, j], 0 in the padding up to a multiple of 32. grid (params * row blocks,)"""
    blocks = tl.cdiv(samples, ROWS)
    at = stage_ptr + tl.program_id(0) // blocks * 4
    address, stride, size, column = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    rows = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    source = address.to(tl.pointer_type(HELD), bitcast=True) + rows.to(tl.int64)[:, None] * stride
    target = scratch_ptr + rows.to(tl.int64)[:, None] * width + column
    inb = (rows < samples)[:, None]
    for j in range(0, tl.cdiv(size, 32) * 32, COLUMNS):
        columns = (j + tl.arange(0, COLUMNS)).to(tl.int64)[None, :]
        x = tl.load(source + columns, mask=inb & (columns < size), other=0)
        tl.store(target + columns, x, mask=inb & (columns < (size + 31) // 32 * 32))
