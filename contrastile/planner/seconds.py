"""The seconds of a step, from its work and the rates of a profile: towers, loss, communication, optimizer, data.

A kernel takes the longer of the host's time to launch it and the device's to run it; a step the longer of its
computation and of the data's way to it, because the next batch is read meanwhile.
"""

from dataclasses import dataclass
from math import ceil, hypot, log2

import torch

from contrastile.planner.loss import LateSize, LossSize
from contrastile.planner.memory import Side, StepMemory
from contrastile.planner.profile import Profile
from contrastile.planner.towers import Work

# of an optimizer's kernels: the rate of memory over that of a tower's, and the host's time for one over that of a
# tower's, which autograd and modules call. From the rows of AdamW and of Adafactor with momentum in h200_features.csv
UPDATE_BANDWIDTH, UPDATE_LAUNCHES = 1.23, 0.3
# time of the fused kernels in float32 over that in 16 bits, by torch's precision of float32 products: six, three or one
# product of pieces, and the pieces' way through memory
FLOAT32_LOSS = {"highest": 7.0, "high": 3.5, "medium": 1.2}
# the host's time as multiples of that of a small replayed call: each block of a larger loss, and its start
BLOCK_CALLS, START_CALLS = 1.2, 1.3
# the same of ranks that replay a call, and for each doubling of their number, which agree on it; the time of one of its
# hops over that of another call's. From the rows of h200_2_user_calls.csv and h200_4_user_calls.csv
SHARED_CALLS, AGREED_CALLS, REPLAYED_HOP = 7.3, 1.3, 0.17
# the same of ranks of one node whose transfers are copies within the graph, from later rows of these files
COPIED_CALLS = 4.1
# the time of a pair beside its products, over that of a plain softmax: of a sigmoid, with a teacher's probability too,
# with a bit of a guide's mask, and of a sigmoid with labels. From rows of 65,536 x 768 in h200_loss.csv and of
# 32,768 rows in h200_loss_ratios.csv, a teacher's from earlier ones
SIGMOID_PAIRS, TEACHER_PAIRS, MASKED_PAIRS, LABELLED_PAIRS = 1.5, 5.2, 3.2, 3.2
# the same of a softmax with labels; and bytes that move for each feature of a row or column where labels are summed up.
# From the calls in h200_user_calls.csv
SUMMED_PAIRS, SUMMED_BYTES = 1.3, 40
# bytes of a pair whose kept exponential is multiplied by numbers of its row and column in place
EXPONENTIAL_BYTES = 4
# of vectors that a row meets alone: bytes that move for each feature, by the kernels and in PyTorch, and there the
# host's time in calls. From "negatives" and "scores" of 8 vectors in h200_user_calls.csv
LISTED_BYTES, LISTED_BYTES_EAGER, LISTED_CALLS = 8, 20, 3.2
# of token vectors: a sweep's rate over that of towers' products; the time of a sweep that notes the winning tokens over
# that of one that does not; operations in the time of gathering a byte of them, from caches; the host's time, and its
# time before the device begins, in calls. From the rows of 1,024² and of 128² pairs of 32 x 180 tokens in
# h200_maxsim.csv, and a profile of 16,384² pairs; gathering between theirs
SWEEP, WINNERS, GATHERED, LATE_CALLS, LATE_START = 0.896, 1.31, 100.0, 1.8, 0.47

NO_WORK = Work()
# bytes of a number in 16 bits
HALF = 2


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of the parts of a step. `host`: the share of the towers' time in which the device waits for the host."""

    towers: float
    loss: float
    communication: float
    optimizer: float
    data: float
    host: float = 0.0

    @property
    def computed(self) -> float:
        return self.towers + self.loss + self.communication + self.optimizer

    @property
    def total(self) -> float:
        return max(self.computed, self.data)

    @property
    def bottleneck(self) -> str:
        """The part that takes most of the step."""
        if self.data > self.computed:
            return "data"
        parts = {name: getattr(self, name) for name in ("towers", "loss", "communication", "optimizer")}
        most = max(parts, key=lambda name: parts[name])
        return "the host, which launches the towers' kernels" if most == "towers" and self.host > 0.5 else most


def step_seconds(
    step: StepMemory, profile: Profile, *, per_node: int, trained: int, decoded: int = 0, half: bool = True,
    update: Work = NO_WORK,
) -> StepSeconds:  # fmt: skip
    """The seconds of a step of a rank.

    per_node: ranks of a node. trained: bytes of trained parameters. decoded: images of a rank that are decoded. half:
    towers compute in 16 bits. update: the work of the optimizer.
    """
    towers = waiting = 0.0
    guides = ((guide, 0) for guide in step.guides)
    for side, retained in (*zip(step.sides, step.retained_graphs(), strict=True), *guides):
        seconds, host = _tower_seconds(side, retained, profile, half)
        towers, waiting = towers + seconds, waiting + host
    ranks = step.loss.ranks
    link = profile.link if ranks <= per_node else profile.network
    reduced = 2 * trained * (ranks - 1) / ranks / link
    return StepSeconds(
        towers,
        sum(loss_seconds(loss, profile) for loss in step.losses),
        sum(exchange_seconds(loss, profile) for loss in step.losses) + reduced,
        update_seconds(update, profile),
        decoded / (profile.decode * profile.cpus),
        waiting / towers if towers else 0.0,
    )


def _tower_seconds(side: Side, retained: int, profile: Profile, half: bool) -> tuple[float, float]:
    """Seconds of both passes of a side, and those of them in which the device waits for the host."""
    cost, total, waiting = side.cost, 0.0, 0.0
    rest = side.examples % cost.sub_batch
    replayed = max(0, side.count - retained)
    passes = [(cost.forward_work, replayed)] + ([(cost.replay_work, side.count)] if cost.trained else [])
    for work, count in passes:
        shorter = int(rest > 0 and count > 0)
        for share, times in ((1.0, count - shorter), (rest / cost.sub_batch, shorter)):
            device, host = pass_seconds(work, profile, share, half=half)
            total += times * max(device, host)
            waiting += times * max(0.0, host - device)
    return total, waiting


def update_seconds(work: Work, profile: Profile) -> float:
    """Seconds of an optimizer's step: those of the device or of the host, the longer."""
    device = work.products / profile.products + work.moved / (UPDATE_BANDWIDTH * profile.bandwidth)
    return max(device, work.kernels * UPDATE_LAUNCHES * profile.launch)


def pass_seconds(work: Work, profile: Profile, share: float = 1.0, *, half: bool = True) -> tuple[float, float]:
    """Seconds of the device, and of the host, for a `share` of a sub-batch's work."""
    speed = 1.0 if half else profile.float32
    products = work.products / (profile.products * speed) + work.attention / (profile.attention * speed)
    return share * (products + work.moved / profile.bandwidth), work.kernels * profile.launch


def late_seconds(loss: LateSize, profile: Profile) -> float:
    """Seconds of a rank's pairs of token vectors: one sweep or two, and what the gradients gather."""
    # bytes of the winning tokens that gradients of both sides read
    winners = 2.0 * loss.pairs * loss.tokens[0] * loss.dimensions * loss.dtype.itemsize
    gathered = GATHERED * winners / profile.products
    if loss.backend_name != "triton":
        return hypot(profile.call, 2 * loss.operations / (profile.products * profile.float32) + gathered)
    sweep = loss.operations / (profile.products * SWEEP)
    if loss.dtype == torch.float32:
        sweep *= FLOAT32_LOSS[torch.get_float32_matmul_precision()]
    # share of pairs with a second sweep: those whose winning tokens the forward has not kept
    _, _, kept_pairs, _ = loss.fused
    swept_again = 0.0 if loss.at_once else 1 - kept_pairs / loss.pairs
    device = sweep * (swept_again + WINNERS) + gathered
    return max(LATE_CALLS * profile.call, LATE_START * profile.call + device)


def loss_seconds(loss: LossSize, profile: Profile) -> float:
    """Seconds of a rank's pairs: those of the device, or for small losses those of the host's calls."""
    if isinstance(loss, LateSize):
        return late_seconds(loss, profile)
    wide, fused = loss.dtype.itemsize > HALF, loss.backend_name == "triton"
    factor = 1 / FLOAT32_LOSS[torch.get_float32_matmul_precision()] if fused else profile.float32
    # a CPU's rate is that of its losses in float32
    speed = factor if wide and profile.device != "cpu" else 1.0
    N, M = loss.block
    # a dense block moves its matrices; a tiled one is computed within the workspace, block by block
    pair = profile.dense_pair * loss.matrices if loss.backend_name == "dense" else profile.pair * _pair_work(loss)
    device = loss.operations / (profile.loss * speed) + loss.pairs * pair
    listed = (LISTED_BYTES if fused else LISTED_BYTES_EAGER) * loss.listed * loss.rows * loss.dimensions
    device += listed * loss.directions / profile.bandwidth
    if not fused:
        return hypot((LISTED_CALLS if loss.listed else 1) * profile.call, device)
    blocks = ceil(2 * N * M / max(1, loss.workspace_bytes))
    device += blocks * profile.block
    if loss.exponentials and loss.loss.symmetric:
        device += loss.pairs * EXPONENTIAL_BYTES / profile.bandwidth
    if loss.sums_labels:
        device += (N + M) * loss.dimensions * SUMMED_BYTES / profile.bandwidth
    if loss.replayed:
        # from CUDA graphs, so that host and device work at once
        shared = COPIED_CALLS if loss.kept_bytes else SHARED_CALLS
        calls = 1.0 if loss.ranks == 1 else shared + AGREED_CALLS * log2(loss.ranks)
        return hypot(calls * profile.call, device + loss.replay_copies / profile.bandwidth)
    return max(device, blocks * BLOCK_CALLS * profile.call) + START_CALLS * profile.call


def _pair_work(loss: LossSize) -> float:
    """The work of a pair beside its products, in those of a plain softmax."""
    if loss.loss.pairwise:
        return LABELLED_PAIRS if loss.labels else SIGMOID_PAIRS
    if loss.guide:
        return TEACHER_PAIRS if loss.has_teacher else MASKED_PAIRS
    return SUMMED_PAIRS if loss.labels else 1.0


def exchange_seconds(loss: LossSize, profile: Profile) -> float:
    """Seconds that other ranks' features and gradients add: hops, and what arithmetic does not hide.

    A ring's hop is hidden by the products of its block (Inf-CL, section 3.2), a gather by those of the rank's own. In
    short calls, which are replayed, transfers take multiprocessors from the products, and nothing is hidden.
    """
    if loss.ranks == 1:
        return 0.0
    traffic, arithmetic = loss.traffic, loss.operations / profile.loss
    # one sweep gives a pairwise loss and its gradients
    hops = traffic.hops / (2 if loss.loss.pairwise else 1)
    short = loss.replayed and loss.backend_name == "triton"
    hop, beside = (REPLAYED_HOP * profile.hop, (0.0, 0.0)) if short else (profile.hop, traffic.beside)
    if short and loss.kept_bytes:
        # in the graph, and by copy engines
        hop, beside = 0.0, traffic.beside
    ways = zip(traffic.sent, (profile.link, profile.network), beside, strict=True)
    return hops * hop + sum(max(0.0, sent / rate - share * arithmetic) for sent, rate, share in ways)
