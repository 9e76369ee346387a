"""one_pass: design B. One launch, one pass over DRAM: a group of samples is read for its norms, and read again for
its sums while it is still in L2.

A program takes a ticket, and the ticket says what to do: (slot, tile), slots in the order
    P1(0) .. P1(LAG-1),  then  P1(k+LAG), P2(k)  for k = 0, 1, ..,  then  P2 of the last LAG groups
P1(k, tile) writes the partial squared norms of group k; the last of its tiles to arrive makes the group's factors
and says so (ready). P2(k, tile) waits for that, reads the rows again, and adds integers to the tile's sums with
atomics; the last group to arrive at a tile adds the noise and writes p.grad (if RELEASE).

No deadlock, with any number of programs in flight: the only wait is for P1 tickets, which are smaller, so they
are held by programs that already run and that never wait themselves. Every result is the same bits in any
schedule: partials are added in tile order, and integers in any order.
Bytes between the two touches of a row, tile by tile: ((2 LAG + 1) GROUP es + 8) D and a little (backends/tuning.py).

sync, int32 [1 + 2 groups + tiles], zero before the launch: ticket, arrived[groups], ready[groups], done[tiles]
"""

import triton
import triton.language as tl

from dprs_kernels.kernels.noise import release_tile
from dprs_kernels.kernels.norms import CLIP_FIELDS, clip_factor, segment_scale, tile_squares
from dprs_kernels.kernels.sums import SMALL, add_units, tile_units
from dprs_kernels.kernels.vectors import keep_of_vectors, row_fields, row_pointers, tile_fields, vector_range


@triton.jit
def slot_work(slot, groups, lag):
    """(phase, group) of a slot; phase 0 = norms, 1 = sums. lag <= groups"""
    steady = slot - lag                  # negative: the first P1
    drain = steady - 2 * (groups - lag)  # not negative: the last P2
    k = steady >> 1
    second = (steady & 1) == 1
    phase = tl.where((steady < 0) | ((drain < 0) & (second == 0)), 0, 1)
    group = tl.where(steady < 0, slot, tl.where(drain >= 0, drain + groups - lag, tl.where(second, k, k + lag)))
    return phase, group


@triton.jit
def group_factors(
    norm_ptr, factor_ptr, partial_ptr, clip_ptr, group, samples,
    TILES: tl.constexpr, GROUP: tl.constexpr, BLOCK_T: tl.constexpr,
):   # fmt: skip
    """norm and factor of a group's samples from its partials [tiles, samples], added BLOCK_T tiles at a time."""
    rows = group * GROUP + tl.arange(0, GROUP)
    inb = rows < samples
    squares = tl.zeros([BLOCK_T, GROUP], dtype=tl.float64)
    for t in range(0, TILES, BLOCK_T):
        lane = t + tl.arange(0, BLOCK_T)
        at = partial_ptr + lane.to(tl.int64)[:, None] * samples + rows[None, :]
        squares += tl.load(at, mask=(lane < TILES)[:, None] & inb[None, :], other=0.0)
    norm, factor = clip_factor(
        tl.sum(squares, axis=0), 1 / segment_scale(clip_ptr, 0), tl.load(clip_ptr + CLIP_FIELDS), clip_ptr
    )
    tl.store(norm_ptr + rows, norm, mask=inb)
    tl.store(factor_ptr + rows, tl.where(inb, factor, 0.0).to(tl.float32))


@triton.jit(do_not_specialize=["samples", "groups", "lag"])
def _one_pass_kernel(
    total_ptr, norm_ptr, factor_ptr, partial_ptr, sync_ptr, tile_ptr, row_ptr, bits_ptr, clip_ptr,
    out_ptr, release_ptr, key_ptr, step_ptr, samples, groups, lag,
    DTYPE: tl.constexpr, TILES: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr, L: tl.constexpr, E: tl.constexpr,
    HAS_KEEP: tl.constexpr, RELEASE: tl.constexpr, OUT: tl.constexpr,
):   # fmt: skip
    """grid (2 groups TILES,). Flat or automatic clipping, SMALL units, aligned rows; factor [groups * GROUP].

    TILES is known when compiling: a model has one, and dividing by an unknown number takes 25 instructions.
    """
    ticket = tl.atomic_add(sync_ptr, 1, sem="relaxed")
    arrived_ptr = sync_ptr + 1
    ready_ptr = arrived_ptr + groups
    done_ptr = ready_ptr + groups
    tile = ticket % TILES
    phase, group = slot_work(ticket // TILES, groups, lag)
    param, column, columns, word = tile_fields(tile_ptr, tile)
    address, stride = row_fields(row_ptr, param)
    first = group * GROUP
    if phase == 0:
        ROWS: tl.constexpr = GROUP if GROUP < 8 else 8
        scale = segment_scale(clip_ptr, 0)
        for r in range(0, GROUP, ROWS):
            rows = first + r + tl.arange(0, ROWS)
            pointers = row_pointers(address, stride, column, first + r, ROWS, DTYPE, E, True)
            squares = tile_squares(
                bits_ptr, pointers, columns, word, rows < samples, scale, DTYPE, L, E, C, True, HAS_KEEP, True
            )
            tl.store(partial_ptr + tile.to(tl.int64) * samples + rows, squares, mask=rows < samples)
        tl.debug_barrier()   # every thread's partials, before thread 0 says so
        if tl.atomic_add(arrived_ptr + group, 1, sem="acq_rel") == TILES - 1:
            tl.debug_barrier()
            group_factors(norm_ptr, factor_ptr, partial_ptr, clip_ptr, group, samples, TILES, GROUP, 32)
            tl.debug_barrier()
            tl.atomic_xchg(ready_ptr + group, 1, sem="release")
    else:
        PART: tl.constexpr = GROUP if GROUP < 4 else 4   # four SMALL contributions fit an int32
        keep = keep_of_vectors(bits_ptr, word, vector_range(C, L), columns, E, HAS_KEEP)
        ready = tl.atomic_add(ready_ptr + group, 0, sem="acquire")
        while ready == 0:
            ready = tl.atomic_add(ready_ptr + group, 0, sem="acquire")
        tl.debug_barrier()
        units = tl.zeros([C, L, E], dtype=tl.int64)
        for r in range(0, GROUP, PART):
            pointers = row_pointers(address, stride, column, first + r, PART, DTYPE, E, True)
            factors = tl.load(factor_ptr + first + r + tl.arange(0, PART))
            units += tile_units(pointers, factors, keep, DTYPE, E, SMALL, True)
        add_units(total_ptr, word, keep, units, E, SMALL)
        if RELEASE:
            tl.debug_barrier()   # every thread's additions, before thread 0 says so
            if tl.atomic_add(done_ptr + tile, 1, sem="acq_rel") == groups - 1:
                tl.debug_barrier()
                AT_ONCE: tl.constexpr = C * L * E // 8 if C * L * E < 2048 else 256   # blocks: one a thread
                # Unrolled: a loop would keep every constant of the transform in a register.
                for part in tl.static_range(C * L * E // 8 // AT_ONCE):
                    if columns > part * (AT_ONCE * 8):
                        release_tile(
                            tl.load(out_ptr + param), column + part * (AT_ONCE // 4), columns - part * (AT_ONCE * 8),
                            word + part * (AT_ONCE // 4), total_ptr, bits_ptr, release_ptr, key_ptr, step_ptr,
                            OUT, AT_ONCE, HAS_KEEP, True,
                        )   # fmt: skip
