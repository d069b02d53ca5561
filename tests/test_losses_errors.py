"""Every sentence that a user of the losses can be told: name, rule, what was got, what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from refusals import refusal
from torch import Tensor

from contrastile import ClipLoss, DCLLoss, GISTLoss, InfoNCELoss, KeyQueue, NTXentLoss, SigLipLoss, SupConLoss, contrast
from contrastile.losses.hardness import Hardness
from contrastile.losses.scores import ScoreDivergence, ScoreMargins
from contrastile.losses.sigmoid import Sigmoid
from contrastile.losses.softmax import Softmax
from contrastile.scorers import MaxSim


def _x(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(*shape, dtype=dtype)


def _meta(*shape: int) -> Tensor:
    return torch.ones(*shape, device="meta")


class Sharded(Tensor):
    """What is seen of a DTensor."""

    device_mesh = None


OPTIONS = (
    "must be one of the options backend, exchange, group, gradient, label_smoothing, reduction, workspace, device; got"
)
# the function has its other keywords before them
KEYWORDS = OPTIONS.replace(
    "options ", "options scale, bias, loss, positives, negatives, query_labels, key_labels, query_ids, key_ids, "
    "negative_ids, guide_q, guide_k, weights, scorer, ",
)  # fmt: skip
CALL = "must be one of the arguments of InfoNCELoss: query, key, scale, positives, negatives, query_ids, key_ids, "
CALL += "negative_ids, weights; got"
PAIRED = "image_features, text_features, logit_scale, logit_bias, output_dict, ids, labels, weights; got"
SENTENCES: dict[str, Callable[[], Any]] = {
    f"`scale` must be one of the arguments of SigLipLoss: {PAIRED} scale=10.0. Did you mean logit_scale?":
        lambda: SigLipLoss()(_x(3, 4), _x(3, 4), scale=10.0),
    f"`key_ids` must be one of the arguments of ClipLoss: {PAIRED} key_ids=a tensor [3]. Did you mean ids?":
        lambda: ClipLoss()(_x(3, 4), _x(3, 4), 10.0, key_ids=torch.arange(3)),
    f"`logit_scale` {CALL} logit_scale=10.0. Did you mean scale?":
        lambda: InfoNCELoss()(_x(3, 4), _x(3, 4), logit_scale=10.0),
    f"`temperature` {CALL} temperature=0.1. Pass the scale, 1 / temperature, in the call.":
        lambda: InfoNCELoss()(_x(3, 4), _x(3, 4), temperature=0.1),
    f"`reduction` {CALL} reduction='none'. Pass it to the constructor, InfoNCELoss(...).":
        lambda: InfoNCELoss()(_x(3, 4), _x(3, 4), 10.0, reduction="none"),
    f"`weigths` {CALL} weigths=a tensor [3]. Did you mean weights?":
        lambda: InfoNCELoss()(_x(3, 4), _x(3, 4), 10.0, weigths=_x(3)),
    "`logit_scale` must be given in the call of DCLLoss; got none. Write DCLLoss(...)(image_features, text_features, "
    "logit_scale), with * before a tuple of them.": lambda: DCLLoss()(_x(3, 4), text_features=_x(3, 4)),
    "`q` must have two dimensions [rows, features]; got shape [3, 2, 4]. Flatten the others first, or compare token "
    "vectors by contrast(..., scorer=MaxSim()).": lambda: contrast(_x(3, 2, 4), _x(3, 2, 4), scale=1.0),
    "`positives` must be a tensor of shape [3] or [3, P]; got list. Convert it with torch.as_tensor.":
        lambda: InfoNCELoss()(_x(3, 4), _x(3, 4), 1.0, positives=[0, 1, 2]),
    "`logit_bias` must be a number or a tensor of shape [] or [1]; got str. Convert it with float().":
        lambda: SigLipLoss()(_x(3, 4), _x(3, 4), 1.0, "-10"),
    "`q` must be a tensor; got list. Convert it with torch.as_tensor.": lambda: contrast([1.0], _x(3, 4), scale=1.0),
    "`q` must have two dimensions [rows, features]; got shape [3]. Pass a batch.":
        lambda: contrast(_x(3), _x(3, 4), scale=1.0),
    "`q` must be floating point; got torch.int64. Convert it with .float().":
        lambda: contrast(_x(3, 4, dtype=torch.int64), _x(3, 4), scale=1.0),
    "`q` must be bf16, fp16, fp32 or fp64; got torch.float8_e4m3fn. Convert it with .float().":
        lambda: contrast(_x(3, 4).to(torch.float8_e4m3fn), _x(3, 4), scale=1.0),
    "`q` must be a dense tensor of this process; got torch.sparse_coo. Pass its to_local(), or its to_dense().":
        lambda: [contrast(x, _x(3, 4), scale=1.0) for x in (_x(3, 4), _x(3, 4).to_sparse())],
    "`k` must be a dense tensor of this process; got a DTensor. Pass its to_local(), or its to_dense().":
        lambda: contrast(_x(3, 4), _x(3, 4).as_subclass(Sharded), scale=1.0),
    "`q` must have values; got a tensor on meta. Move the model to a device that computes.":
        lambda: contrast(_meta(3, 4), _meta(3, 4), scale=1.0),
    "`q` must have at least one feature; got shape [3, 0]. Check the encoder's output.":
        lambda: contrast(_x(3, 0), _x(3, 0), scale=1.0),
    "`q` must have at least one row over all ranks; got 0. Skip the step when the batch is empty.":
        lambda: contrast(_x(0, 4), _x(0, 4), scale=1.0),
    "`k` must have the same feature size as `q`; got 5 and 4. Project one side first.":
        lambda: contrast(_x(3, 4), _x(3, 5), scale=1.0),
    "`k` must have the dtype of `q`; got torch.float64 and torch.float32. Convert one side first.":
        lambda: contrast(_x(3, 4), _x(3, 4, dtype=torch.float64), scale=1.0),
    "`k` must be on the device of `q`; got meta and cpu. Move one side first.":
        lambda: contrast(_x(3, 4), _meta(3, 4), scale=1.0),
    "`k` must have as many rows as `q`; got 2 and 3. Pass one row for each: row i of one belongs to row i of the "
    "other. Further keys go with loss=Softmax().": lambda: contrast(_x(3, 4), _x(2, 4), scale=1.0),
    "`k` must have at least as many rows as `q`; got 2 and 3. Or pass `positives`.":
        lambda: contrast(_x(3, 4), _x(2, 4), scale=1.0, loss=Softmax()),
    "`scale` must be a number or a tensor of shape [] or [1]; got str. Pass logit_scale.exp(), say.":
        lambda: contrast(_x(3, 4), _x(3, 4), scale="1"),
    "`scale` must be a tensor of shape [] or [1]; got shape [3]. One number serves all pairs.":
        lambda: contrast(_x(3, 4), _x(3, 4), scale=_x(3)),
    "`scale` must be floating point; got torch.int64. Convert it with .float().":
        lambda: contrast(_x(3, 4), _x(3, 4), scale=torch.tensor(3)),
    "`bias` must be on the device of `q`; got meta and cpu. Move one side first.":
        lambda: contrast(_x(3, 4), _x(3, 4), scale=1.0, bias=_meta(1)),
    "`query_ids` must be a tensor of shape [3], one entry for each row of `q`; got shape [2]. Pass the entries of "
    "these 3 rows, in their order.":
        lambda: contrast(_x(3, 4), _x(3, 4), scale=1.0, query_ids=torch.arange(2), key_ids=torch.arange(3)),
    "`ids` must be integers; got torch.bool. Number the groups first, with torch.unique for example.":
        lambda: ClipLoss()(_x(3, 4), _x(3, 4), 1.0, ids=torch.ones(3, dtype=torch.bool)),
    "`key_ids` must be integers; got torch.float32. Number the groups first, with torch.unique for example.":
        lambda: contrast(_x(3, 4), _x(3, 4), scale=1.0, query_ids=torch.arange(3), key_ids=_x(3)),
    "`key_ids` must be a tensor of shape [5], one entry for each row of `key`; got int. Convert it with "
    "torch.as_tensor.":
        lambda: InfoNCELoss()(_x(3, 4), _x(3, 4), 1.0, negatives=_x(2, 4), query_ids=torch.arange(3), key_ids=3),
    "`key_ids` must be a tensor of shape [5], one entry for each row of `key`; got shape []. Pass the entries of "
    "these 5 rows, in their order.":
        lambda: InfoNCELoss()(
            _x(3, 4), _x(3, 4), 1.0, negatives=_x(2, 4), query_ids=torch.arange(3), key_ids=torch.tensor(3),
        ),
    "`key_ids` must be given where `query_ids` is; got None. Pass both, or neither.":
        lambda: contrast(_x(3, 4), _x(3, 4), scale=1.0, query_ids=torch.arange(3)),
    "`query_labels` must be given where `key_labels` is; got None. Pass both, or neither.":
        lambda: contrast(_x(3, 4), _x(3, 4), scale=1.0, key_labels=torch.arange(3)),
    "`weights` must be real numbers; got torch.complex64. Convert it with .float().":
        lambda: contrast(_x(3, 4), _x(3, 4), scale=1.0, weights=_x(3, dtype=torch.complex64)),
    "`loss` must be a loss of contrastile.losses, as an object; got ClipLoss. Pass Softmax(...) or Sigmoid(...), say. "
    "A module such as ClipLoss is called itself.": lambda: contrast(_x(3, 4), _x(3, 4), scale=1.0, loss=ClipLoss()),
    "`loss` must be a loss of contrastile.losses, as an object; got the class Softmax. Pass Softmax(...) or "
    "Sigmoid(...), say. A module such as ClipLoss is called itself.":
        lambda: contrast(_x(3, 4), _x(3, 4), scale=1.0, loss=Softmax),
    "`weights` must be on the device of `q`; got meta and cpu. Move one side first.":
        lambda: contrast(_x(3, 4), _x(3, 4), scale=1.0, weights=_meta(3)),
    "`positives` must be a tensor of shape [3] or [3, P]; got shape [2]. List each query's keys.":
        lambda: InfoNCELoss()(_x(3, 4), _x(3, 4), 1.0, positives=torch.arange(2)),
    "`positives` must be integers; got torch.float32. Pass indices of keys, -1 where there is none.":
        lambda: InfoNCELoss()(_x(3, 4), _x(3, 4), 1.0, positives=_x(3)),
    "`positives` must be on the device of `query`; got meta and cpu. Move one side first.":
        lambda: InfoNCELoss()(_x(3, 4), _x(3, 4), 1.0, positives=_meta(3).long()),
    "`positives` must index this rank's 3 keys, or be -1; got 4. Count from this rank's first key.":
        lambda: InfoNCELoss()(_x(3, 4), _x(3, 4), 1.0, positives=torch.tensor([0, 1, 4]), negatives=_x(2, 4)),
    "`key` must have at least as many rows as `query`; got 2 and 3. Or pass `positives`.":
        lambda: InfoNCELoss()(_x(3, 4), _x(2, 4), 1.0, negatives=_x(2, 4)),
    "`positives` must index this rank's 3 keys, or be -1; got 3. Count from this rank's first key.":
        lambda: InfoNCELoss()(_x(3, 4), _x(3, 4), 1.0, positives=torch.tensor([0, 1, 3])),
    "`positives` must index this rank's 3 keys, or be -1; got -2. Count from this rank's first key.":
        lambda: InfoNCELoss()(_x(3, 4), _x(3, 4), 1.0, positives=torch.tensor([0, 1, -2])),
    "`positives` must be left out for a symmetric loss; got both. Pass labels, or take a one-way loss.":
        lambda: contrast(_x(3, 4), _x(3, 4), scale=1.0, positives=torch.arange(3)),
    "`positives` must be left out where labels are given; got both. Pass one of the two.":
        lambda: contrast(
            _x(3, 4), _x(3, 4), scale=1.0, loss=Softmax(), positives=torch.arange(3), query_labels=torch.arange(3),
            key_labels=torch.arange(3),
        ),
    "`negatives` must be left out for a symmetric loss; got both. Pass loss=Softmax(), say.":
        lambda: contrast(_x(3, 4), _x(3, 4), scale=1.0, negatives=_x(2, 4)),
    "`negatives` must have the same feature size as `key`; got 5 and 4. Project one side first.":
        lambda: InfoNCELoss()(_x(3, 4), _x(3, 4), 1.0, negatives=_x(2, 5)),
    "`backend` must be one of auto, dense, eager, triton; got 'cuda'. Leave it out for the default.":
        lambda: ClipLoss(backend="cuda"),
    "`exchange` must be one of auto, single, replicate, gather, ring, hierarchical; got 'all'. Leave it out for the "
    "default.": lambda: ClipLoss(exchange="all"),
    "`gradient` must be one of mean, sum; got 'average'. Leave it out for the default.":
        lambda: ClipLoss(gradient="average"),
    "`reduction` must be one of mean, sum, none; got 'max'. Leave it out for the default.":
        lambda: ClipLoss(reduction="max"),
    "`label_smoothing` must be at least 0 and below 1; got 1.0. 0.1 is usual.": lambda: ClipLoss(label_smoothing=1.0),
    "`label_smoothing` must be 0 for the sigmoid loss; got 0.1. Leave it out, or take a softmax loss.":
        lambda: SigLipLoss(label_smoothing=0.1),
    "`weights` must not require a gradient; got some that do. Detach them: they are taken as constants.":
        lambda: ClipLoss()(_x(3, 4), _x(3, 4), 1.0, weights=_x(3).requires_grad_()),
    "`workspace` must be a whole number of bytes, 1048576 at least; got 1000. Leave it out for the default.":
        lambda: ClipLoss(workspace=1000),
    "`label_smoothing` must be at least 0 and below 1; got 'a little'. 0.1 is usual.":
        lambda: ClipLoss(label_smoothing="a little"),
    "`device` must be one that torch knows; got 'gpu'. Leave it out to compute where the features are.":
        lambda: ClipLoss(device="gpu"),
    "`group` must be a process group; got int. Pass what torch.distributed.new_group gives.":
        lambda: contrast(_x(3, 4), _x(3, 4), scale=1.0, group=3),
    f"`local_loss` {OPTIONS} local_loss=True, rank=0. Leave it out: a loss meets all ranks by itself, with gradients "
    "to all of them.": lambda: ClipLoss(local_loss=True, rank=0),
    f"`temperature` {OPTIONS} temperature=0.5. Pass the scale, 1 / temperature, in the call.":
        lambda: NTXentLoss(temperature=0.5),
    f"`scale` {OPTIONS} scale=20.0. Pass it in the call.": lambda: ClipLoss(scale=20.0),
    f"`logit_scale` {KEYWORDS} logit_scale=20.0. Pass it in the call, to contrast as `scale`.":
        lambda: contrast(_x(3, 4), _x(3, 4), logit_scale=20.0),
    f"`labels` {KEYWORDS} labels=a tensor [3]. Pass them in the call, to contrast as `query_labels` and "
    "`key_labels`.": lambda: contrast(_x(3, 4), _x(3, 4), scale=1.0, labels=torch.arange(3)),
    f"`mask` {KEYWORDS} mask=a tensor [3, 2]. Pass token vectors and their mask as a pair, (vectors, mask).":
        lambda: contrast(_x(3, 2, 4), _x(3, 2, 4), mask=_x(3, 2)),
    f"`scorer` {OPTIONS} scorer=MaxSim(). Pass it to contrast, the function under every loss.":
        lambda: NTXentLoss(scorer=MaxSim()),
    f"`normalize` {OPTIONS} normalize=True. Leave it out, and pass torch.nn.functional.normalize(x, "
    "dim=-1).": lambda: ClipLoss(normalize=True),
    f"`hard_negatives` {KEYWORDS} hard_negatives=a tensor [3, 2, 4]. Pass `negatives` in the call: [H, D] for all "
    "queries, [N, H, D] for each query's own.":
        lambda: contrast(_x(3, 4), _x(3, 4), scale=1.0, hard_negatives=_x(3, 2, 4)),
    f"`chunk` {KEYWORDS} chunk=8. Check the spelling.": lambda: contrast(_x(3, 4), _x(3, 4), scale=1.0, chunk=8),
    f"`bakend` {OPTIONS} bakend='eager'. Did you mean backend?": lambda: ClipLoss(bakend="eager"),
    f"`sigm` {OPTIONS.replace('options', 'options sigma,')} sigm=1.0. Did you mean sigma?": lambda: DCLLoss(sigm=1.0),
    f"`dist_impl` {OPTIONS.replace('options', 'options balanced,')} dist_impl='gather'. Pass exchange=\"gather\" or "
    '"ring", or leave it out.': lambda: SigLipLoss(dist_impl="gather"),
    f"`positive` {KEYWORDS} positive=None. Did you mean positives?":
        lambda: contrast(_x(3, 4), _x(3, 4), scale=1.0, positive=None),
    "`text_features` must have as many rows as `image_features`; got 2 and 3. Pass one row for each: row i of one "
    "belongs to row i of the other.": lambda: SigLipLoss()(_x(3, 4), _x(2, 4), 1.0),
    "`ids` must be a tensor of shape [3], one entry for each row of `image_features`; got list. Convert it with "
    "torch.as_tensor.": lambda: ClipLoss()(_x(3, 4), _x(3, 4), 1.0, ids=[1, 2, 3]),
    "`logit_bias` must be a tensor of shape [] or [1]; got shape [3]. One number serves all pairs.":
        lambda: SigLipLoss()(_x(3, 4), _x(3, 4), 1.0, _x(3)),
    "`weights` must be a tensor of shape [3], one entry for each row of `image_features`; got shape [2]. Pass the "
    "entries of these 3 rows, in their order.": lambda: ClipLoss()(_x(3, 4), _x(3, 4), 1.0, weights=_x(2)),
    "`text_features` must have the same feature size as `image_features`; got 5 and 4. Project one side first.":
        lambda: ClipLoss()(_x(3, 4), _x(3, 5), 1.0),
    "`key` must have the same feature size as `query`; got 5 and 4. Project one side first.":
        lambda: InfoNCELoss()(_x(3, 4), _x(3, 5), 1.0),
    "`features` must be floating point; got torch.int64. Convert it with .float().":
        lambda: SupConLoss()(_x(3, 4, dtype=torch.int64), torch.arange(3), 1.0),
    "`features` must be a tensor of shape [N, D] or [N, views, D]; got shape [3]. Pass features first, then labels; "
    "flatten further axes.": lambda: SupConLoss()(_x(3), torch.arange(3), 1.0),
    "`labels` must be given; got None. Pass torch.arange(3) where only the views of one example are alike.":
        lambda: SupConLoss()(_x(3, 2, 4)),
    "`mask` must be one of the arguments of SupConLoss: features, labels, scale, weights; got mask=a tensor [3, 3]. "
    "Pass labels: examples of equal labels are positives.": lambda: SupConLoss()(_x(3, 2, 4), mask=torch.eye(3)),
    "`key` must have two dimensions [rows, features]; got shape [3, 2, 4]. Where each query has a list of keys, the "
    "right one first, pass key[:, 0], negatives=key[:, 1:]; or compare token vectors by contrast(..., "
    "scorer=MaxSim()).": lambda: InfoNCELoss()(_x(3, 4), _x(3, 2, 4), 1.0),
    "`positives` must be indices of keys; got a mask of shape [3, 4]. Of a mask make indices: torch.where(mask != 0, "
    "torch.arange(4), -1).":
        lambda: InfoNCELoss()(_x(3, 4), _x(4, 4), 1.0, positives=torch.eye(3, 4, dtype=torch.int64)),
    "`positives` must be indices of keys; got a mask of shape [2, 3]. Of a mask make indices: torch.where(mask != 0, "
    "torch.arange(3), -1).":
        lambda: InfoNCELoss()(_x(2, 4), _x(3, 4), 1.0, positives=torch.tensor([[0, 1, 1], [1, 1, 1]]).byte()),
    "`positives` must be integers; got torch.bool. Of a mask make indices: torch.where(mask != 0, torch.arange(4), "
    "-1).": lambda: InfoNCELoss()(_x(3, 4), _x(4, 4), 1.0, positives=torch.eye(3, 4, dtype=torch.bool)),
    "`labels` must be a tensor of shape [6], one entry for each row of `features`; got shape [3]. Pass "
    "labels.repeat(2) where views are concatenated.": lambda: SupConLoss()(_x(6, 4), torch.arange(3), 1.0),
    "`labels` must be a tensor of shape [3], one entry for each row of `features`; got shape [3, 1]. Pass `labels`[:, "
    "0].": lambda: SupConLoss()(_x(3, 4), torch.ones(3, 1, dtype=torch.int64), 1.0),
    "`labels` must be a tensor of shape [3], one entry for each row of `features`; got shape [3, 2]. Pass "
    "`labels`.argmax(dim=1) if its rows are one-hot.":
        lambda: SupConLoss()(_x(3, 4), torch.ones(3, 2, dtype=torch.int64), 1.0),
    "`ids` must be a tensor of shape [3], one entry for each row of `image_features`; got shape [3, 1]. Pass `ids`[:, "
    "0].": lambda: ClipLoss()(_x(3, 4), _x(3, 4), 1.0, ids=torch.ones(3, 1, dtype=torch.int64)),
    "`weights` must be a tensor of shape [3], one entry for each row of `image_features`; got shape [3, 3]. Pass the "
    "entries of these 3 rows, in their order.": lambda: ClipLoss()(_x(3, 4), _x(3, 4), 1.0, weights=_x(3, 3)),
    "`labels` must be a tensor of shape [3], one entry for each row of `features`; got list. Pass a number for each "
    "word, the same one on all ranks.": lambda: SupConLoss()(_x(3, 4), ["a", "b", "a"], 1.0),
    "`view_a` must be a tensor; got list. Pass one of its tensors, or join them with torch.stack or torch.cat.":
        lambda: NTXentLoss()([_x(4)] * 3, _x(3, 4), 1.0),
    "`query` must be a tensor; got dict. Pass the tensor of features.":
        lambda: InfoNCELoss()({"last_hidden_state": _x(3, 4)}, _x(3, 4), 1.0),
    "`negatives` must be a tensor; got KeyQueue. Pass its keys.":
        lambda: InfoNCELoss()(_x(3, 4), _x(3, 4), 1.0, negatives=KeyQueue(2, 4)),
    "`labels` must be a tensor of shape [3], one entry for each row of `features`; got shape [2]. Pass the entries of "
    "these 3 rows, in their order.": lambda: SupConLoss()(_x(3, 4), torch.arange(2), 1.0),
    "`view_b` must have as many rows as `view_a`; got 2 and 3. Pass one row for each: row i of one belongs to row i "
    "of the other.": lambda: NTXentLoss()(_x(3, 4), _x(2, 4), 1.0),
    "`symmetric` must be True or False; got 'no'. Pass one of these, without quotes.": lambda: Softmax(symmetric="no"),
    "`uses_bias` must stay as Sigmoid has it; got False. Leave it out.": lambda: Sigmoid(uses_bias=False),
    "`exclude_self` must be False for a loss of listed keys; got True. Leave it out.":
        lambda: ScoreMargins(exclude_self=True),
    "`loss` must be one of pairs; got ScoreDivergence. ScoreDistillLoss gives it its lists.":
        lambda: contrast(_x(3, 4), _x(3, 4), scale=1.0, loss=ScoreDivergence()),
    "`balanced` must be True or False; got 'no'. Pass one of these, without quotes.": lambda: SigLipLoss(balanced="no"),
    "`in_batch` must be True or False; got 'no'. Pass one of these, without quotes.":
        lambda: InfoNCELoss(in_batch="no"),
    "`contrast_anchors` must be True or False; got 1. Pass one of these, without quotes.":
        lambda: GISTLoss(contrast_anchors=1),
    "`contrast_positives` must be True or False; got 'no'. Pass one of these, without quotes.":
        lambda: GISTLoss(contrast_positives="no"),
    "`hardness_mode` must be another one with in_batch=False; got 'in_batch_negatives'. A query meets no other "
    "query's keys.": lambda: InfoNCELoss(in_batch=False, hardness_mode="in_batch_negatives", hardness_strength=5.0),
    "`negatives` must be [N, H, D], each query's own, with hardness_mode=\"hard_negatives\"; got shape [2, 4]. List "
    "them.":
        lambda: InfoNCELoss(
            hardness_mode="hard_negatives", hardness_strength=5.0,
        )(_x(3, 4), _x(3, 4), 1.0, negatives=_x(2, 4)),
    "`negatives` must be [N, H, D], each query's own, with hardness_mode=\"hard_negatives\"; got None. List them.":
        lambda: contrast(_x(3, 4), _x(3, 4), scale=1.0, loss=Hardness(hardness_mode="hard_negatives")),
    '`scorer` must be left out with hardness_mode="hard_negatives"; got one. Take another mode: with a scorer all '
    "queries share the negatives.":
        lambda: contrast(
            _x(3, 5, 4), _x(3, 6, 4), scale=1.0, scorer=MaxSim(), loss=Hardness(hardness_mode="hard_negatives"),
            negatives=_x(2, 6, 4),
        ),
    "`positives` must index this rank's 3 keys, or be -1; got 6. Count from this rank's first key.":
        lambda: GISTLoss(contrast_anchors=True)(
            _x(3, 4), _x(3, 4), 1.0, guide_query=_x(3, 2), guide_key=_x(3, 2), positives=torch.tensor([0, 1, 6]),
        ),
    "`negative_ids` must be integers of shape [3, 2], one for each of the negatives; got shape [3, 2], "
    "torch.complex64. A negative with the id of its query does not count.":
        lambda: InfoNCELoss()(
            _x(3, 4), _x(3, 4), 1.0, negatives=_x(3, 2, 4), query_ids=torch.arange(3), negative_ids=_x(3, 2) + 0j,
        ),
    "`ids` must be on the device of the queue; got meta and cpu. Move the queue with .to(device).":
        lambda: KeyQueue(6, 4).push(_x(3, 4), _meta(3).long()),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*rows of length")
@pytest.mark.parametrize("sentence", SENTENCES)
def test_each_error_has_its_sentence(sentence: str) -> None:
    assert refusal(SENTENCES[sentence]) == sentence


@pytest.mark.parametrize("negatives", [{}, {"negatives": _x(2, 4), "guide_negatives": _x(2, 2)}], ids=["", "negatives"])
def test_ids_of_all_columns_of_pairs_are_integers_too(negatives: dict[str, Tensor]) -> None:
    ids = {"query_ids": torch.arange(3), "key_ids": torch.rand(5 if negatives else 3)}
    with pytest.raises(ValueError, match=r"`key_ids` must be integers; got torch\.float32"):
        GISTLoss(contrast_anchors=True)(
            _x(3, 4), _x(3, 4), 1.0, guide_query=_x(3, 2), guide_key=_x(3, 2), **ids, **negatives
        )
