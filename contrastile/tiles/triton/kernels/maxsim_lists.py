"""Device code of the entries that each block of tokens has won: their number, and their places in lists.

Below `maxsim.py`. Each entry has a code of four bits, and a warp takes 32 entries at once. Four votes, one on
each bit, tell a thread which entries have the code of its own; those before it are its rank. From the same votes each
thread counts the entries of one code, the number of the thread, so that the counts of all codes take one register.
"""

import triton
import triton.language as tl

from contrastile.tiles.triton.kernels.arithmetic import INTERPRETED

# blocks of tokens that are listed by one program; codes of entries that blocks before them have won, and of all others
FIELDS, BEFORE, OTHER = tl.constexpr(14), tl.constexpr(14), tl.constexpr(15)
# entries of a thread that a call of the assembly takes, one after the other
PACK = 16
BITS = range(4)


def _step(code: str, value: str | None) -> list[str]:
    """The assembly for 32 entries: store their values, if there are any, and add to `count` those of its own code."""
    lines = []
    for bit in BITS:
        lines += [f"and.b32 x, {code}, {1 << bit};", "setp.ne.u32 set, x, 0;"]
        lines += [f"vote.sync.ballot.b32 ballot{bit}, set, 0xffffffff;"]
        if value:
            lines += ["selp.b32 x, 0, -1, set;", f"xor.b32 x, x, ballot{bit};"]
            lines += ["and.b32 same, same, x;" if bit else "mov.b32 same, x;"]
    if value:
        lines += ["and.b32 same, same, before;", "popc.b32 same, same;"]
        lines += [f"shfl.sync.idx.b32 y, count, {code}, 0x1f, 0xffffffff;", "add.s32 y, y, same;"]
        lines += ["mad.wide.u32 at, y, 4, memory;", f"setp.lt.u32 set, {code}, {FIELDS.value};"]
        lines += [f"@set st.global.b32 [at], {value};"]
    lines += ["xor.b32 x, ballot0, own0;"]
    for bit in BITS[1:]:
        lines += [f"xor.b32 y, ballot{bit}, own{bit};", "and.b32 x, x, y;"]
    return [*lines, "popc.b32 x, x;", "add.s32 count, count, x;"]


def _steps(*, store: bool) -> str:
    """Results: counts. Arguments: codes, counts, and values and memory to `store`; of counts and memory the first."""
    registers = ", ".join(f"{name}{bit}" for name in ("ballot", "own") for bit in BITS)
    lines = [".reg .pred set;", f".reg .b32 x, y, same, before, count, lane, {registers};", ".reg .b64 at, memory;"]
    lines += ["mov.u32 lane, %laneid;", "mov.u32 before, %lanemask_lt;", f"mov.b32 count, ${2 * PACK};"]
    lines += [f"mov.b64 memory, ${4 * PACK};"] if store else []
    for bit in BITS:
        lines += [f"and.b32 x, lane, {1 << bit};", "setp.ne.u32 set, x, 0;", f"selp.b32 own{bit}, 0, -1, set;"]
    for entry in range(PACK):
        lines += _step(f"${PACK + entry}", f"${3 * PACK + entry}" if store else None)
    lines += [f"mov.b32 ${entry}, count;" for entry in range(PACK)]
    return "{\n" + "\n".join(lines) + "\n}"


def _bounds() -> str:
    """Results: begins, ends and blocks, −1 but for a thread's first. Arguments: counts, of a thread the first."""
    counts = f"${3 * PACK}"
    lines = [".reg .pred some;", ".reg .b32 x, total, lane, earlier;", "mov.u32 lane, %laneid;"]
    lines += [f"mov.b32 total, {counts};"]
    lines += [f"shfl.sync.idx.b32 earlier, total, {BEFORE.value}, 0x1f, 0xffffffff;"]
    for distance in (1, 2, 4, 8):
        lines += [f"shfl.sync.up.b32 x|some, total, {distance}, 0x0, 0xffffffff;", "@some add.s32 total, total, x;"]
    lines += ["add.s32 total, total, earlier;", f"sub.s32 x, total, {counts};"]
    lines += [f"setp.lt.u32 some, lane, {FIELDS.value};", "selp.b32 lane, lane, -1, some;"]
    for entry in range(PACK):
        lines += [f"mov.b32 ${entry}, x;", f"mov.b32 ${PACK + entry}, total;"]
        lines += [f"mov.b32 ${2 * PACK + entry}, {-1 if entry else 'lane'};"]
    return "{\n" + "\n".join(lines) + "\n}"


COUNT, LIST = tl.constexpr(_steps(store=False)), tl.constexpr(_steps(store=True))
BOUNDS = tl.constexpr(_bounds())
COUNT_ARGUMENTS, LIST_ARGUMENTS, BOUNDS_ARGUMENTS = (
    tl.constexpr(",".join(["=&r"] * (results * PACK) + ["r"] * (arguments * PACK) + ["l"] * (memory * PACK)))
    for results, arguments, memory in ((1, 2, 0), (1, 3, 1), (3, 1, 0))
)
AT_ONCE = tl.constexpr(PACK)


@triton.jit
def places_by_step(ROWS: tl.constexpr):
    """0 to ROWS − 1, of which a warp's 32 threads have 32 in a row at each step.

    Triton would load neighbours by one thread if it knew them.
    """
    places = tl.arange(0, ROWS)
    if not INTERPRETED:
        places = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [places], dtype=tl.int32, is_pure=True, pack=1)
    return places


@triton.jit
def counted(code, counts):
    """The counts with those of the codes: of each code one in a thread; interpreted, one at each first place."""
    if INTERPRETED:
        counts += tl.sum((code[None, :] == tl.arange(0, code.shape[0])[:, None]).to(tl.int32), 1)
    else:
        counts = tl.inline_asm_elementwise(
            COUNT, COUNT_ARGUMENTS, [code, counts], dtype=tl.int32, is_pure=True, pack=AT_ONCE
        )
    return counts


@triton.jit
def bounds(counts):
    """Begins and ends of the blocks' lists, behind those of blocks before, and the blocks, −1 for none."""
    if INTERPRETED:
        places = tl.arange(0, counts.shape[0])
        end = tl.cumsum(counts, 0) + tl.sum(tl.where(places == BEFORE, counts, 0))
        begin, field = end - counts, tl.where(places < FIELDS, places, -1)
    else:
        begin, end, field = tl.inline_asm_elementwise(
            BOUNDS, BOUNDS_ARGUMENTS, [counts], dtype=(tl.int32, tl.int32, tl.int32), is_pure=True, pack=AT_ONCE
        )
    return begin, end, field


@triton.jit
def listed(list_at, code, value, begin):
    """Store each entry's value in the list of its block, which begins there; return the begins behind them."""
    if INTERPRETED:
        same = (code[:, None] == tl.arange(0, code.shape[0])[None, :]).to(tl.int32)
        at = tl.sum(same * (tl.cumsum(same, 0) - 1 + begin[None, :]), 1)
        tl.store(list_at + at, value, mask=code < FIELDS)
        begin += tl.sum(same, 0)
    else:
        memory = tl.zeros_like(code).to(tl.int64) + list_at.to(tl.int64)
        begin = tl.inline_asm_elementwise(
            LIST, LIST_ARGUMENTS, [code, begin, value, memory], dtype=tl.int32, is_pure=False, pack=AT_ONCE
        )
    return begin
