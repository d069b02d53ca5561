"""A recipe as the planner sees it: its towers, made without memory, its loss, its optimizer, its batches.

`planner/` adds up what every part of a step declares.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, pairwise, product
from math import ceil
from string import ascii_lowercase
from typing import Any

import torch
from torch import Tensor, nn

from contrastile._errors import invalid, logger, whole_number
from contrastile.data.sources import is_collection
from contrastile.distributed.neighbours import reach_each_other
from contrastile.exchange import host
from contrastile.models.base import compiled_parts, feature_size
from contrastile.models.text import train_tokenizer
from contrastile.models.towers import special_tokens
from contrastile.offload import free_memory
from contrastile.planner.loss import LateSize, LossSize
from contrastile.planner.memory import LIBRARIES, Held, Side, StepMemory
from contrastile.planner.plan import MOST_ROWS, Plan
from contrastile.planner.profile import Target, has_kernels, target, this_machine
from contrastile.planner.towers import (
    Counted,
    TowerCost,
    Work,
    as_compiled,
    made_on_meta,
    measure,
    shapes_only,
    without_memory,
)
from contrastile.train.config import AnyRecipe, Recipe
from contrastile.train.config.base import OptimSettings
from contrastile.train.config.losses import RetrieverScores
from contrastile.train.config.towers import without_folders
from contrastile.train.load import class_of
from contrastile.train.objective import OBJECTIVES, teacher_recipe
from contrastile.train.optim import members_of, state_bytes, step_bytes, stepped_without_memory
from contrastile.train.recipe import load_any_recipe
from contrastile.train.run import HALVES, LoadedRun, autocast, choose_device, has_bf16, ready_tokenizer
from contrastile.train.sharded import GATHERED_ONCE

# tensors of a sub-batch of texts: the indices of tokens, and the mask
TOKEN_TENSORS = 2
# sub-batches of inputs on a device: the present one, and the next that is copied meanwhile
STREAMED_SUB_BATCHES = 2
# tensors of the inputs' size that the gradient of a normalisation takes for a moment: of vectors of tokens, and of one
# vector for each image or text, beside the gradient itself
NORMALISED_TOKENS, NORMALISED = 5, 4
# times that clipping reads or writes the gradient: for its norm, and to multiply it
CLIPPING_PASSES = 3
# rows that are more than any sub-batch
UNLIMITED = 2**40
# bytes of the id of a key in a queue
ID_BYTES = 8
CPU = torch.device("cpu")


def planned(
    recipe: Any, overrides: Sequence[str] = (), gpus: str | None = None, batch: int | None = None,
    pairs: int | None = None, *, ranks: int = 1,
) -> Plan:  # fmt: skip
    """`contrastile.plan`. ranks: those of this machine, used without `gpus`; they compute on the recipe's device."""
    machines = None if gpus is None else target(gpus)
    if isinstance(recipe, AnyRecipe) and overrides:
        remedy = "Give them where it is loaded, or name its file."
        raise invalid("overrides", "be left out with a recipe that was loaded", ", ".join(overrides), remedy)
    settings: Any = recipe
    if not isinstance(recipe, AnyRecipe):
        settings = load_any_recipe(recipe, overrides, files=False, effects=True)
    machines = machines or this_machine(choose_device(settings.device), ranks)
    if settings.train.precision == "auto":
        here = choose_device(settings.device) if gpus is None else CPU
        bf16 = machines.bf16 if gpus is not None and machines.device != "cpu" else has_bf16(here)
        train = settings.train.model_copy(update={"precision": "bf16" if bf16 else "float32"})
        settings = settings.model_copy(update={"train": train})
    cpu = machines.device == "cpu"
    if settings.loss.backend == "triton" and not ("TRITON_INTERPRET" in os.environ if cpu else machines.kernels):
        rule = f'be "auto", "eager" or "dense" on {"a CPU" if cpu else machines.word}'
        remedy = "Or name GPUs to plan, such as 8xH100-80GB."
        raise invalid("loss.backend", rule, '"triton"', remedy)
    if batch is not None:
        rule = f"be a whole number of pairs, at least {machines.ranks}, one for each rank"
        batch = whole_number("batch", batch, machines.ranks, "Such as 65536.", rule=rule)
        if batch > (most := MOST_ROWS * machines.ranks * settings.train.accumulate):
            raise invalid("batch", f"be at most {most:,} pairs", f"{batch:,}", "Plan a smaller one.")
    if pairs is not None:
        pairs = whole_number("pairs", pairs, 1, "Leave it out for the recipe's own.")
        if settings.train.examples is not None and settings.train.epoch_steps is None:
            got = f"{pairs:,} beside train.examples={settings.train.examples}"
            raise invalid("pairs", "be left out for a run of known length", got, "Or train for epochs of them.")
        # the batches of the training, which may be smaller where pairs are few
        settings = settings.model_copy(update={"train": settings.train.fitted(pairs)})
    largest = max(size for _, size in settings.train.batch)
    model, costs = towers(settings, machines.ranks, batch or largest, machines.device)
    plan = plan_of(settings, machines, batch or largest, model, costs, stages(settings, pairs))
    if plan.stages:
        plan = replace(plan, examples=settings.train.length(pairs or 0))
    wholes = [size for _, size, _ in sub_batches(settings, UNLIMITED).values()]
    if any(side.cost.sub_batch < size for side, size in zip(plan.step.sides, wholes, strict=True)):
        # larger batches than this one have larger sub-batches
        _, costs = towers(settings, 1, max(wholes) * settings.train.accumulate, machines.device)
        sides = [replace(side, whole=cost) for side, cost in zip(plan.step.sides, costs, strict=True)]
        plan = replace(plan, step=replace(plan.step, sides=sides))
    return plan if batch is None else plan.at(batch)


def planned_memory(run: LoadedRun, batch: int, ranks: int) -> dict[str, int] | None:
    """The parts of a finished run's planned peak, for its report; None on a CPU, whose tensors are not counted.

    A plan that fails is reported and never costs a run its end.
    """
    if run.device.type != "cuda" or not batch:
        return None
    try:
        memory = free_memory(run.device)[1]
        copies = reach_each_other(run.device, range(ranks))
        words = {"copies": copies, "kernels": has_kernels(run.device)}
        machines = Target(str(run.device), None, memory, ranks, ranks, run.device.type, **words)
        model, costs = towers(run.recipe, ranks, batch, tokenizer=run.tokenizer)
        return plan_of(run.recipe, machines, batch, model, costs).peak.parts
    except Exception as error:
        logger.warning("no plan of the memory: %s: %s", type(error).__name__, error)
        return None


def _late(recipe: Any) -> bool:
    """True for a retriever with many vectors."""
    return getattr(recipe.model, "kind", "single") == "late"


def _sizes(recipe: Any) -> tuple[int, ...]:
    """Numbers of features, of which the first so many have a loss of their own beside that of all."""
    return getattr(recipe.model, "dimensions", ())


def stages(recipe: Any, pairs: int | None = None) -> tuple[tuple[int, int], ...]:
    """Batch size and number of steps of each stage of a run; none for one in epochs of an unknown number of pairs."""
    train = recipe.train
    if train.examples is None and pairs is None:
        return ()
    examples, seen, steps = train.length(pairs or 0), 0, list[tuple[int, int]]()
    for (_, size), (end, _) in pairwise([*train.batch, (1.0, 0)]):
        # a stage begins behind the last step of the one before
        steps.append((size, max(0, ceil((end * examples - seen) / size))))
        seen += size * steps[-1][1]
    return tuple(steps)


def sub_batches(recipe: Any, rows: int) -> dict[str, tuple[int, int, int]]:
    """The examples of each side of a rank's part of `rows` queries, those of a sub-batch, and the tokens of one."""
    cut, tokens = recipe.train.sub_batch, recipe.model.tokenizer
    if isinstance(recipe, Recipe):
        sides = {"image": (rows, cut.image, 0), "text": (rows, cut.at_once("text", tokens.length), tokens.length)}
    else:
        each = {"query": (1, tokens.query_length), "passage": (keys_of(recipe), tokens.length)}
        sides = {name: (n * rows, cut.at_once(name, length), length) for name, (n, length) in each.items()}
    return {name: (examples, min(most, examples), length) for name, (examples, most, length) in sides.items()}


def keys_of(recipe: Any) -> int:
    """Keys for each query."""
    return 1 if isinstance(recipe, Recipe) else recipe.data.positives + recipe.data.hard_negatives


def towers(
    recipe: Any, ranks: int, batch: int, device: str = "cuda", *, frozen: bool = False, tokenizer: Any = None
) -> tuple[nn.Module, list[TowerCost]]:
    """The recipe's model without memory, and the cost of each side's sub-batch for a batch of all ranks.

    device: the type of the devices that would run it. frozen: no weight is trained, as in a teacher. tokenizer: the
    one of a run; without it, one is trained on as many made-up words as the recipe allows.
    """
    rows = ceil(batch / ranks / recipe.train.accumulate)
    special = special_tokens(recipe.model) if _late(recipe) else ()
    tokenizer = tokenizer or made_up_tokenizer(recipe.model.tokenizer, special)
    # weights in folders are not read, and nothing is compiled
    train = recipe.train.model_copy(update={"compile": False})
    settings = without_folders(recipe).model_copy(update={"device": "meta", "train": train})
    with made_on_meta():
        model = class_of(recipe).untrained(settings, tokenizer).model.train()
    if frozen:
        model.eval().requires_grad_(False)
    context, costs = partial(autocast, CPU, recipe.train.precision), []
    with shapes_only(device):
        without_memory(model)
        for name, (_, size, length) in sub_batches(recipe, rows).items():
            encoder, module = _encoder(model, name)
            inputs = partial(_inputs, recipe, length)
            if name == "image" and recipe.model.precompute:
                # the tower ran before the first step
                tower: Any = module.tower
                width = feature_size(tower, *inputs(1))
                inputs = partial(lambda features, n: [torch.zeros(n, features)], width)
            compiled = recipe.train.compile is True and not frozen
            layers = compiled_parts(module) if compiled else ()
            with as_compiled(layers, partial(_encoded, encoder, inputs, context), size):
                costs.append(measure(name, encoder, inputs, module, size, context, builds_graph=compiled))
    return model, costs


def _encoded(encoder: Callable[..., Tensor], inputs: Callable[[int], list[Tensor]], context: Any, n: int) -> Tensor:
    with context():
        return encoder(*inputs(n))


def _encoder(model: Any, side: str) -> tuple[Callable[..., Tensor], nn.Module]:
    """The function that encodes a side, and the module inside."""
    if hasattr(model, "encoders"):
        # trimming padding needs values
        return model.encoder(side), model.encoder(side)
    return getattr(model, f"encode_{side}"), getattr(model, side)


def _inputs(recipe: Any, length: int, n: int) -> list[Tensor]:
    """A sub-batch of `n` examples: texts of `length` tokens, or images where that is 0."""
    if length:
        return [torch.ones(n, length, dtype=torch.int64) for _ in range(TOKEN_TENSORS)]
    data = recipe.data
    dtype = torch.uint8 if is_collection(data.source) else torch.float32
    return [torch.zeros(n, data.channels, data.image_size, data.image_size, dtype=dtype)]


def _compared(recipe: Any) -> tuple[int, int, int]:
    """Keys of a query that meet all queries; listed passages that meet it alone; and the vectors that these take.

    Those are copies of them, the gradients of the copies, and the gradient of passages that meet no other query.
    """
    loss, keys = recipe.loss, keys_of(recipe)
    positives, negatives = (1, 0) if isinstance(recipe, Recipe) else (recipe.data.positives, recipe.data.negatives)
    if getattr(loss, "own_negatives", False):
        # the keys of all queries are taken out of the passages too, and again where they meet their own query alone
        shared, listed = (positives, negatives) if loss.in_batch else (0, 1 + negatives)
        return shared, listed, 2 * (negatives + 1) + (not loss.in_batch) + keys - shared
    if isinstance(loss, RetrieverScores):
        listed, shared = positives + negatives, keys if loss.weight < 1 else 0
        # with another loss both have a gradient of all passages
        return shared, listed, (2 + (loss.weight < 1)) * listed + keys - shared
    return keys, 0, 0


def plan_of(
    recipe: Any, machines: Target, batch: int, model: nn.Module, costs: Sequence[TowerCost],
    lengths: tuple[tuple[int, int], ...] = (),
) -> Plan:  # fmt: skip
    """The plan of a recipe whose towers are measured: its sides, its loss, and the bytes held throughout a step."""
    train, ranks, keys = recipe.train, machines.ranks, keys_of(recipe)
    rows = ceil(batch / ranks / train.accumulate)
    half = HALVES.get(train.precision)
    feature_dtype = torch.float64 if train.precision == "float64" else torch.float32
    on_gpu, late = machines.device == "cuda", _late(recipe)
    sides = _sides(recipe, rows, costs, feature_dtype, half=half is not None, on_gpu=on_gpu)
    kind, queue = recipe.loss.kind, getattr(recipe.loss, "queue", 0)
    both_ways = isinstance(recipe, Recipe) and kind in ("infonce", "gist")
    size_of: Any = LossSize
    dimensions = costs[0].dimensions
    # pairs of queries, and pairs of keys
    anchors, positives = (getattr(recipe.loss, f"contrast_{name}", False) for name in ("anchors", "positives"))
    if late:
        dimensions = recipe.model.features
        size_of = partial(LateSize, tokens=tuple([cost.dimensions // dimensions for cost in costs]))
    pair_loss = OBJECTIVES[recipe.kind](recipe.loss).pair_loss
    labels = kind == "supcon" or getattr(recipe.loss, "labels", False)
    indexed = not isinstance(recipe, Recipe) or pair_loss.exclude_self or labels
    shared, listed, copied = _compared(recipe)
    loss = size_of(
        rows, shared * rows, ranks, dimensions, machines.memory, recipe.loss.exchange, recipe.loss.backend,
        machines.device, getattr(recipe.loss, "workspace", None), half or feature_dtype, feature_dtype,
        pair_loss, queue=queue // ranks, own_columns=anchors + positives, halves=positives, listed=listed,
        directions=2 if both_ways else 1, indexed=indexed, labels=labels, ids=not labels,
        node=machines.per_node, copies=machines.copies, kernels=machines.kernels,
    )  # fmt: skip
    teacher, guides = 0, list[Side]()
    if (other := teacher_recipe(recipe)) is not None:
        try:
            guide, guide_costs = towers(other, ranks, batch, machines.device, frozen=True)
        except ValueError as error:
            # a run keeps its weights when the folders that its recipe names are gone
            logger.warning("the plan leaves loss.%s out: %s", recipe.loss.other_model, error)
        else:
            teacher = sum(x.nbytes for x in (*guide.parameters(), *guide.buffers()))
            guides = [Side(cost, side.examples) for cost, side in zip(guide_costs, sides, strict=True)]
            loss = replace(loss, guide=guide_costs[0].dimensions)
    queues = (2 if both_ways else 1) * queue * (dimensions * feature_dtype.itemsize + ID_BYTES)
    weights = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
    trained = sum(x.nbytes for x in model.parameters() if x.requires_grad)
    share = ranks if train.parallel == "shard" else 1
    # shards, and whole weights during a step where they are few
    held_weights = weights // share + (weights if share > 1 and weights <= GATHERED_ONCE else 0)
    held = Held(
        held_weights, state_bytes(model, recipe.optim) // share, trained // share if recipe.optim.ema else 0,
        trained if train.accumulate > 1 else 0,
        # `Ranks.combine` takes one buffer of all gradients
        max(step_bytes(model, recipe.optim) // share, trained if ranks > 1 else 0),
        LIBRARIES if on_gpu else 0, teacher, queues,
    )  # fmt: skip
    pictures = isinstance(recipe, Recipe) and is_collection(recipe.data.source) and not recipe.model.precompute
    inputs = sum(side.examples * side.cost.inputs for side in sides) // max(1, rows)
    sizes = _sizes(recipe)
    copies = copied * (dimensions + sum(sizes)) * feature_dtype.itemsize
    step = StepMemory(sides, loss, held, train.retain, guides, sharded=share > 1, listed=copies, sizes=sizes)
    # on a CPU they are there already
    if train.features == "host" and machines.device != "cpu":
        host.check_exchange(recipe.loss.exchange, ranks, "loss.exchange")
        step = step.with_features_on_host()
    return Plan(
        recipe.name, machines, batch, step, keys, train.accumulate, weights, trained, inputs, int(pictures),
        half is not None, recipe.may_stream,
        update_work(model, recipe.optim, share) if machines.profile is not None else Work(), lengths,
    )  # fmt: skip


def _sides(
    recipe: Any, rows: int, costs: Sequence[TowerCost], feature_dtype: torch.dtype, *, half: bool, on_gpu: bool
) -> list[Side]:
    """The sides of a rank's part of `rows` queries. half: the towers compute in 16 bits."""
    sides = []
    for cost, (examples, size, _) in zip(costs, sub_batches(recipe, rows).values(), strict=True):
        # normalisation keeps features of the loss's dtype; the task holds normalised ones, and a retriever's as encoded
        wide = feature_dtype.itemsize * cost.dimensions
        if _late(recipe):
            # in float32 where they are not, without those that do not count, and normalised
            copies, held_by_task = wide * (half + recipe.model.normalise), 0
            copies += cost.features if cost.name == "passage" else 0
            normalisation = (NORMALISED_TOKENS - half) * wide
        else:
            copies, held_by_task = wide - cost.features, wide if isinstance(recipe, Recipe) else wide + cost.features
            # gradients of both sides in the loss's dtype; float32 copies of features in 16 bits are freed with the loss
            normalisation = NORMALISED * wide + 2 * (wide - cost.features)
        # of the first so many features too; normalisation keeps views of float32
        dimensions = recipe.model.features if _late(recipe) else cost.dimensions
        copies += wide * sum(_sizes(recipe)) // dimensions * (half + (_late(recipe) and recipe.model.normalise))
        inputs = (STREAMED_SUB_BATCHES * size if on_gpu else 0) * cost.inputs
        sides.append(Side(cost, examples, inputs, copies, held_by_task, normalisation))
    return sides


def update_work(model: nn.Module, settings: OptimSettings, share: int = 1, *, clipped: bool = True) -> Work:
    """The work on each of `share` ranks of an optimizer's step, and of clipping, counted on weights without memory."""
    optimizer = stepped_without_memory(model, settings)
    with Counted() as counter:
        optimizer.step()
    gradients = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    work = counter.work + Work(moved=CLIPPING_PASSES * gradients * clipped)
    for member in members_of(optimizer):
        for group in member.param_groups:
            # the weights that one stands for
            if others := group["alike"] - 1:
                (parameter,) = group["params"]
                with Counted() as counter, torch.no_grad():
                    member.update(parameter, parameter.grad, member.state[parameter], group)
                work += counter.work.times(others)
    return replace(work, moved=work.moved / share)


def made_up_tokenizer(settings: Any, special: Sequence[str] = ()) -> Any:
    """The recipe's tokenizer; one that the run would train on its texts is trained on as many made-up words."""
    if (ready := ready_tokenizer(settings)) is not None:
        return ready
    words = map("".join, islice(product(ascii_lowercase, repeat=5), settings.size))
    return train_tokenizer(words, size=settings.size, length=settings.length, special=special)
