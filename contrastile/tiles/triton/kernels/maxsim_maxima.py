"""Device code of a document's maxima: the largest product of each query token, and the first column that has it.

Below `maxsim.py`. The bits of numbers that are not negative are ordered as integers are, and processors with
wide products compare three integers at once. So a thread takes the maximum of its 16 columns as integers. If that
maximum is negative, so are all 16 numbers, and the largest number is the least integer. Of each column x,

    min(x − maximum, 2^c), without a sign,

is 0 for a maximum and 2^c for any other, in one operation. The numbers 2^c fall from column to column, so that the
highest bit that no column has set is that of the first maximum.
"""

import triton
import triton.language as tl

from contrastile.tiles.triton.kernels.arithmetic import INTERPRETED

# threads that share a row of products in the tensor cores, and its columns that lie side by side in one of them
LANES, SIDE = tl.constexpr(4), tl.constexpr(2)
# a thread's columns of a tile of 64
PLACES = tl.constexpr(16)
# rows that a thread compares together, so that one vote serves them
ROWS = 2


def _assembly(*, places: bool) -> str:
    """The assembly for ROWS rows: arguments are the maxima and, with `places`, their places; then column by column."""
    rows, columns = range(ROWS), range(PLACES.value)
    results = [f"${row}" for row in rows]
    outputs = [f"${ROWS + row}" for row in rows]
    first = ROWS * (1 + places)
    x = [[f"${first + column * ROWS + row}" for column in columns] for row in rows]

    def extreme(operation: str, row: int, condition: str = "") -> list[str]:
        """The extreme of a row, three at a time."""
        numbers, lines = x[row], []
        while len(numbers) > 1:
            threes = [numbers[at : at + 3] for at in range(0, len(numbers), 3)]
            numbers = []
            for number, three in enumerate(threes):
                result = three[0]
                for other in three[1:]:
                    lines.append(f"{condition}{operation}.s32 r{number}, {result}, {other};")
                    result = f"r{number}"
                numbers.append(result)
        return [*lines, f"{condition}mov.b32 {results[row]}, {numbers[0]};"]

    def bits(row: int, difference: str, condition: str = "") -> list[str]:
        """Bits of the columns of a row that are not its maximum."""
        lines = [f"{condition}mov.b32 {outputs[row]}, 0;"]
        for column in columns:
            lines += [
                f"{condition}sub.s32 r0, {difference.format(x=x[row][column], most=results[row])};",
                f"{condition}min.u32 r0, r0, {1 << (PLACES.value - 1 - column)};",
                f"{condition}or.b32 {outputs[row]}, {outputs[row]}, r0;",
            ]
        return lines

    lines = [".reg .pred negative, any;", ".reg .b32 least, r0, r1, r2, r3, r4, r5;"]
    for row in rows:
        lines += extreme("max", row)
    lines += [f"min.s32 least, {', '.join(results)};", "setp.lt.s32 negative, least, 0;"]
    lines += ["vote.sync.any.pred any, negative, 0xffffffff;"]
    for row in rows if places else ():
        lines += bits(row, "{x}, {most}")
    lines += ["@!any bra.uni DONE${:uid};"]
    for row in rows:
        lines += [f"setp.lt.s32 negative, {results[row]}, 0;", *extreme("min", row, "@negative ")]
        # of negative numbers the larger ones are smaller as integers
        lines += bits(row, "{most}, {x}", "@negative ") if places else []
    lines += ["DONE${:uid}:"]
    for row in rows if places else ():
        lines += [f"not.b32 r0, {outputs[row]};", f"and.b32 r0, r0, {(1 << PLACES.value) - 1};"]
        lines += ["bfind.u32 r0, r0;", f"sub.s32 {outputs[row]}, {PLACES.value - 1}, r0;"]
    return "{\n" + "\n".join(lines) + "\n}"


TOPS, BEST = tl.constexpr(_assembly(places=False)), tl.constexpr(_assembly(places=True))
ROWS_AT_ONCE = tl.constexpr(ROWS)
TOPS_ARGUMENTS, BEST_ARGUMENTS = (
    tl.constexpr(",".join(["=&r"] * (ROWS * outputs) + ["r"] * (ROWS * PLACES.value))) for outputs in (1, 2)
)


@triton.jit
def _by_thread(s, BM: tl.constexpr, BN: tl.constexpr):
    """[BM, LANES, BN / LANES]: the columns of a row that one thread holds come last, ascending."""
    x = tl.permute(tl.reshape(s, (BM, BN // (LANES * SIDE), LANES, SIDE)), (0, 2, 1, 3))
    return tl.reshape(x, (BM, LANES, BN // LANES))


@triton.jit
def _halves(x, BM: tl.constexpr, WIDTH: tl.constexpr):
    """The first and the last half of the columns; each thread has its own, so nothing moves."""
    return tl.split(tl.permute(tl.reshape(x, (BM, LANES, 2, WIDTH // 2)), (0, 1, 3, 2)))


@triton.jit
def _fours(x, BM: tl.constexpr):
    """Four columns [BM, LANES] one by one."""
    left, right = _halves(x, BM, 4)
    a, b = tl.split(left)
    c, d = tl.split(right)
    return a, b, c, d


@triton.jit
def maxima(s, BM: tl.constexpr, BN: tl.constexpr, WITH_PLACES: tl.constexpr):
    """Maxima [BM, LANES] of each thread's columns and, WITH_PLACES, the first place among them that has it.

    A thread's place is `column` in a tile.
    """
    x = _by_thread(s, BM, BN)
    if INTERPRETED:
        top = tl.max(x, 2)
        at = tl.argmax(x, 2)
    else:
        tl.static_assert(BN == LANES * PLACES)
        left, right = _halves(x, BM, PLACES)
        first, second = _halves(left, BM, PLACES // 2)
        third, fourth = _halves(right, BM, PLACES // 2)
        columns = _fours(first, BM) + _fours(second, BM) + _fours(third, BM) + _fours(fourth, BM)
        if WITH_PLACES:
            top, at = tl.inline_asm_elementwise(
                BEST, BEST_ARGUMENTS, columns, dtype=(tl.float32, tl.int32), is_pure=True, pack=ROWS_AT_ONCE
            )
        else:
            top = tl.inline_asm_elementwise(
                TOPS, TOPS_ARGUMENTS, columns, dtype=tl.float32, is_pure=True, pack=ROWS_AT_ONCE
            )
            at = top
    return top, at


@triton.jit
def column(place, BN: tl.constexpr):
    """The block and the column [BM, LANES] in it of a thread's places, counted on from block to block."""
    # powers of two divide without a sign in one operation
    place = place.to(tl.uint32, bitcast=True)
    within = place % (BN // LANES)
    at = (within // SIDE * (LANES * SIDE) + within % SIDE).to(tl.int32, bitcast=True)
    return (place // (BN // LANES)).to(tl.int32, bitcast=True), at + SIDE * tl.arange(0, LANES)[None, :]
