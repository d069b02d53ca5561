"""Losses with the constructor words of open_clip's, and its command line with the gradient cache (2.30 to 4.x).

    python -m contrastile.integrations.open_clip --sub-batch 64 --model ViT-B-16 --batch-size 4096 ...

runs `open_clip_train.main` with all its flags, of version 4 `open_clip_train.legacy_main`, because main trains by tasks
there. The model encodes each batch in sub-batches of 64, and the losses hold no matrix of logits. With `--accum-freq k`
the k batches of a step are one batch: the gradient is that of the whole, the scale's and the bias's too, which
open_clip's own loop makes k times too large.

The classes may also take the place of open_clip's: `open_clip.factory.ClipLoss = ClipLoss`, as `replace_losses` does.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import contrastile
from contrastile import contrast, encode
from contrastile._errors import invalid, one_of, whole_number
from contrastile._torch import pytree
from contrastile._types import ExchangeName
from contrastile.losses import Sigmoid

# ways of SigLIP between ranks, and the exchange that does the same
EXCHANGES: dict[str | None, ExchangeName] = {
    None: "auto", "bidir": "ring", "shift": "ring", "reduce": "gather", "gather": "gather",
}  # fmt: skip
# of open_clip, for pip
VERSIONS = ">=2.30,<4"


def _exchange(world_size: int, exchange: ExchangeName = "auto") -> ExchangeName:
    """The exchange of this many ranks."""
    return exchange if world_size > 1 else "single"


def _refuse_other_worlds(loss: Any, _inputs: object) -> None:
    """Raise for a loss whose world is not the process group, before it is called: the group may follow the loss."""
    present = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if loss.world_size > 1 and loss.world_size != present:
        remedy = "Call torch.distributed.init_process_group first, or launch with torchrun."
        raise invalid("world_size", f"be that of the process group, {present}", loss.world_size, remedy)


class ClipLoss(contrastile.ClipLoss):
    """`contrastile.ClipLoss` with open_clip's constructor words.

    Arguments:
        local_loss, gather_with_grad, cache_labels: taken, and without effect. Whatever they say, the value is the loss
            of the global batch, and the gradient, after DistributedDataParallel's mean, is that of the global batch;
            open_clip has this gradient with the first two both on.
        rank, world_size: of the process group, by the first call; a world size of 1 is this process alone.
        use_horovod: only False.

    Called as open_clip's: `loss(image_features, text_features, logit_scale, logit_bias=None, output_dict=False)`.
    """

    def __init__(
        self,
        local_loss: bool = False,
        gather_with_grad: bool = False,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        use_horovod: bool = False,
    ) -> None:
        if use_horovod:
            raise invalid("use_horovod", "be False", True, "Launch with torchrun.")
        super().__init__(exchange=_exchange(world_size))
        self.local_loss, self.gather_with_grad, self.cache_labels = local_loss, gather_with_grad, cache_labels
        self.rank, self.world_size, self.use_horovod = rank, world_size, use_horovod
        self.register_forward_pre_hook(_refuse_other_worlds)


class SigLipLoss(contrastile.SigLipLoss):
    """`contrastile.SigLipLoss` with open_clip's constructor words.

    Arguments:
        cache_labels, chunk_size: taken, and without effect: no labels exist, and tiles bound the memory.
        rank, world_size: as for `ClipLoss`.
        dist_impl: "bidir" and "shift" are `exchange="ring"`, "reduce" and "gather" are "gather"; None is "auto".
    """

    def __init__(
        self,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        dist_impl: str | None = None,
        chunk_size: int = 0,
    ) -> None:
        if dist_impl is not None:
            one_of("dist_impl", dist_impl, ("bidir", "shift", "reduce", "gather"), "Leave it out to have one chosen.")
        super().__init__(exchange=_exchange(world_size, EXCHANGES[dist_impl]))
        self.cache_labels, self.rank, self.world_size = cache_labels, rank, world_size
        self.dist_impl, self.chunk_size = dist_impl, chunk_size
        self.register_forward_pre_hook(_refuse_other_worlds)

    def _loss(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
        negative_only: bool = False,
    ) -> Tensor:
        """The loss of one block of pairs, of which `negative_only` leaves none positive; open_clip's tests call it."""
        nothing = torch.full((len(image_features),), -1, device=image_features.device) if negative_only else None
        return contrast(
            image_features, text_features, scale=logit_scale, bias=0.0 if logit_bias is None else logit_bias,
            loss=Sigmoid(), positives=nothing, exchange="single",
        )  # fmt: skip


class CoCaLoss(ClipLoss):
    """The contrastive and the caption loss of CoCa, with open_clip's constructor and call.

    The caption loss is the mean cross-entropy over this rank's tokens that are not `pad_id`.
    """

    def __init__(
        self, caption_loss_weight: float, clip_loss_weight: float, pad_id: int = 0, *words: Any, **named: Any
    ) -> None:
        super().__init__(*words, **named)
        self.caption_loss_weight, self.clip_loss_weight = caption_loss_weight, clip_loss_weight
        self.caption_loss = nn.CrossEntropyLoss(ignore_index=pad_id)

    def forward(  # type: ignore[override]
        self,
        image_features: Tensor,
        text_features: Tensor,
        logits: Tensor,
        labels: Tensor,
        logit_scale: Tensor | float,
        output_dict: bool = False,
    ) -> Any:
        # a weight of 0 spares the exchange with other ranks
        contrastive = logits.new_zeros(())
        if self.clip_loss_weight:
            contrastive = self.clip_loss_weight * super().forward(image_features, text_features, logit_scale)
        caption = self.caption_loss_weight * self.caption_loss(logits.permute(0, 2, 1), labels)
        if output_dict:
            return {"contrastive_loss": contrastive, "caption_loss": caption}
        return contrastive, caption


class DistillClipLoss(ClipLoss):
    """The contrastive loss and the divergence from a teacher, with open_clip's constructor and call.

    Its `distill_loss` is open_clip's less the teacher's entropy, which has no gradient: 0 where nothing is left to
    learn. The teacher's features and its scale are constants.
    """

    def __init__(self, *words: Any, **named: Any) -> None:
        super().__init__(*words, **named)
        self.divergence = contrastile.DistillClipLoss(weight=1.0, exchange=_exchange(self.world_size))

    def forward(  # type: ignore[override]
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        dist_image_features: Tensor,
        dist_text_features: Tensor,
        dist_logit_scale: Tensor | float,
        output_dict: bool = False,
    ) -> Any:
        contrastive = super().forward(image_features, text_features, logit_scale)
        scale = dist_logit_scale.detach() if isinstance(dist_logit_scale, Tensor) else dist_logit_scale
        teacher = dist_image_features.detach(), dist_text_features.detach(), scale
        distill = self.divergence(image_features, text_features, logit_scale, *teacher)
        if output_dict:
            return {"contrastive_loss": contrastive, "distill_loss": distill}
        return contrastive, distill


def replace_losses() -> None:
    """Have `open_clip.create_loss` make these losses."""
    from open_clip import factory

    for loss in (ClipLoss, SigLipLoss, CoCaLoss, DistillClipLoss):
        setattr(factory, loss.__name__, loss)


class CachedModel:
    """A model whose call goes through `encode`; everything else is the model's own.

    Its outputs are the model's for the whole batch, so that open_clip's loop of one epoch runs on it as it is.
    """

    def __init__(self, model: nn.Module, sub_batch: int) -> None:
        self._model, self._sub_batch = model, sub_batch

    def __call__(self, *inputs: Tensor) -> Any:
        return encode(self._model, inputs, sub_batch=self._sub_batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class Joined:
    """A data loader that joins every `count` batches of another, and drops the rest of an epoch."""

    def __init__(self, loader: Any, count: int) -> None:
        self._loader, self._count = loader, count
        self.num_batches = loader.num_batches // count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return int(self.num_batches)

    def __iter__(self) -> Iterator[Any]:
        # version 4 names the sides of a batch
        batches: list[Any] = []
        for batch in self._loader:
            batches.append(batch)
            if len(batches) == self._count:
                yield pytree.tree_map(lambda *sides: torch.cat(sides), *batches)
                batches = []


def train_one_epoch(model: Any, data: Any, *positional: Any, sub_batch: int | None, own: Any, **named: Any) -> Any:
    """open_clip's `train_one_epoch`, here `own`, with its model in a cache, and `--accum-freq` batches as one.

    A teacher of distillation encodes in the same sub-batches.
    """
    *before, teacher, args = positional
    joined, loader = copy.copy(args), data["train"].dataloader
    joined.batch_size, joined.accum_freq = args.batch_size * args.accum_freq, 1
    train = copy.copy(data["train"])
    train.dataloader = Joined(loader, args.accum_freq) if args.accum_freq > 1 else loader
    size = sub_batch or args.batch_size
    if size < joined.batch_size:
        # a batch that is encoded at once needs no cache, and its model may have batch normalisation
        model, teacher = CachedModel(model, size), None if teacher is None else CachedModel(teacher, size)
    return own(model, {**data, "train": train}, *before, teacher, joined, **named)


def main(words: Sequence[str] | None = None) -> Any:
    """Run open_clip's command line with the gradient cache."""
    return _run(*_prepared(words))


def command() -> Any:
    """Run `main` for a process: a mistake in its words is a line and exit code 2, errors of the training are theirs."""
    try:
        prepared = _prepared()
    except (ValueError, ModuleNotFoundError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return _run(*prepared)


def _prepared(words: Sequence[str] | None = None) -> tuple[Any, list[str], int | None]:
    """The module of open_clip's command line, its words, and the sub-batch."""
    parser = argparse.ArgumentParser(
        prog="python -m contrastile.integrations.open_clip", allow_abbrev=False, add_help=False,
        description="open_clip_train.main with contrastile's losses and gradient cache.",
    )  # fmt: skip
    parser.add_argument("--sub-batch", type=int, help="pairs that the model encodes at once (default: --batch-size)")
    own, theirs = parser.parse_known_args(words)
    sub_batch = own.sub_batch
    if sub_batch is not None:
        whole_number("--sub-batch", sub_batch, 1, "Count the pairs that the model encodes at once.")
    if {"-h", "--help"} & set(theirs):
        # open_clip's own help follows, and ends the process
        parser.print_help()
    open_clip_main = _their_main()
    # before any model is built
    _refuse(open_clip_main.parse_args(theirs))
    return open_clip_main, theirs, sub_batch


def _run(open_clip_main: Any, theirs: list[str], sub_batch: int | None) -> Any:
    its_epoch = open_clip_main.train_one_epoch

    def epoch(model: Any, data: Any, *positional: Any, **named: Any) -> Any:
        return train_one_epoch(model, data, *positional, sub_batch=sub_batch, own=its_epoch, **named)

    replace_losses()
    open_clip_main.train_one_epoch = epoch
    try:
        return open_clip_main.main(theirs)
    finally:
        open_clip_main.train_one_epoch = its_epoch


def _their_main() -> Any:
    """The module of open_clip's command line with a loop over batches; main of version 4 trains by tasks."""
    try:
        main = import_module("open_clip_train.main")
        return main if hasattr(main, "create_loss") else import_module("open_clip_train.legacy_main")
    except ModuleNotFoundError as error:
        if find_spec("open_clip") is None:
            message = f'`open_clip` is not installed; run: pip install "open_clip_torch[training]{VERSIONS}"'
            raise ModuleNotFoundError(message, name="open_clip") from error
        if (error.name or "").split(".")[0] not in ("open_clip", "open_clip_train"):
            # one of those that its command line needs, and its models do not
            message = f'`{error.name}` is not installed; run: pip install "open_clip_torch[training]{VERSIONS}"'
            raise ModuleNotFoundError(message, name=error.name) from error
        rule, remedy = "be of version 2.30 to 4.x", f'Run: pip install "open_clip_torch{VERSIONS}".'
        raise invalid("open_clip", rule, f"no module {error.name}", remedy) from error


def _refuse(args: Any) -> None:
    """Raise for jobs whose outputs are more than features."""
    if "coca" in args.model.lower():
        remedy = "Run open_clip_train.main, which needs no cache for it; replace_losses() brings the losses."
        raise invalid("--model", "be one of two towers alone", args.model, remedy)
    # version 4 has no such flag
    if getattr(args, "horovod", False):
        raise invalid("--horovod", "be left out", True, "Launch with torchrun.")


if __name__ == "__main__":
    sys.exit(command())
