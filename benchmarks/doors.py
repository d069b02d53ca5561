"""Time and memory of a training step in the trainers of other libraries, by their loss and by ours in its place.

    python benchmarks/doors.py [DOOR ...] [--ours] [--pairs 8192] [--sub-batch 2048] [--csv FILE]

Forward and backward of random texts of 8 to 64 tokens by an encoder of MiniLM's size with random weights, in
interleaved rounds, under bf16 autocast on a GPU; no download. Each door takes 10 to 30 seconds on an H200; without a
GPU sizes are small. Steps that take seconds run twice, of which the second is timed. The doors of FlagEmbedding,
Tevatron, PyLate and colpali-engine run the code of their pages. Late interaction compares every token of every pair.
"""

import os
import re
import tempfile
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig, BertModel, BertTokenizerFast, Trainer, TrainingArguments
from transformers.utils import logging

from contrastile import InfoNCELoss, encode
from contrastile.bench.harness import Machine, Report, Row, Step, Table, script
from contrastile.bench.peers import FORMULAS
from contrastile.integrations.sentence_transformers import (
    CachedGISTLoss,
    CachedMultiVectorLoss,
    CachedRankingLoss,
    CachedSymmetricLoss,
)
from contrastile.integrations.transformers import ContrastileTrainer, mean_pooled

with warnings.catch_warnings():
    # version 6 has moved what version 5 has there
    warnings.simplefilter("ignore")
    from sentence_transformers import SentenceTransformer, losses, models

# tokens of the texts of each side, and a forward and backward pass of them
Columns = list[dict[str, Tensor]]
Measured = Callable[[Columns], None]
# by implementation and `retain` what makes the steps that are timed together
Problem = dict[tuple[str, Any], Callable[[], Measured]]

OURS, SENTENCES = "contrastile", "sentence-transformers"
# with a limit of tokens in place of rows: texts of like length share a sub-batch, without their common padding
BY_TOKENS = f"{OURS}, sub_batch_tokens"
PACKAGES = (
    "sentence-transformers", "transformers", "lightning", "accelerate", "deepspeed", "FlagEmbedding", "tevatron",
    "pylate", "colpali-engine", "flash-maxsim", "late-interaction-kernels",
)  # fmt: skip
PAGES = Path(__file__).parents[1] / "docs" / "coming_from"
SCALE = 20.0
# the ranking loss of unit rows [N, D], with its matrix
formula = partial(FORMULAS["infonce"], scale=SCALE)
SHORTEST, LONGEST, WORDS = 8, 64, 30522
# features of a token's vector; queries whose scores theirs has at once
VECTOR, SCORED = 128, 256
# seconds of each loss; a step that takes longer than the second is timed once
SECONDS, LONG_STEP = 2.0, 2.0
# length: the most tokens of a text; retain: the argument of `encode`
TABLE = Table(
    "impl=by 29 | loss 14 | model | batch=pairs >6 | sub_batch | length | retain 7 | dtype | ms >9.1f"
    " | peak_bytes=MiB >9.0f"
)


class Embedder(nn.Module):
    """The encoder's mean vectors, of unit length."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, **tokens: Tensor) -> Tensor:
        return mean_pooled(self.bert, **tokens)

    embed = forward


class TokenVectors(nn.Module):
    """The encoder's vectors of tokens as models of colpali-engine return them, of unit length, or those of PyLate."""

    # PyLate's settings of a model
    skiplist, do_query_expansion = list[int](), False

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert, self.linear = bert, nn.Linear(384, VECTOR, bias=False)

    def forward(self, of_pylate: dict[str, Tensor] | None = None, **tokens: Tensor) -> Any:
        vectors = self.linear(self.bert(**(of_pylate or tokens)).last_hidden_state)
        if of_pylate is not None:
            return {"token_embeddings": vectors}
        return F.normalize(vectors, dim=-1) * tokens["attention_mask"][..., None]


class Bench:
    """Sizes of a measurement on a device, and a model with random weights in a folder."""

    def __init__(self, device: torch.device, pairs: int, sub_batch: int, folder: Path) -> None:
        self.device, self.pairs, self.sub_batch, self.folder = device, pairs, sub_batch, folder
        self.on_gpu = device.type == "cuda"
        self.layers = 6 if self.on_gpu else 2
        # queries whose scores theirs has at once, of late interaction: few, where the model sees many texts
        self.scored = min(sub_batch, SCORED)
        # what a door needs while its steps are measured
        self.until_measured = ExitStack()
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(str, range(WORDS - 5))]
        (folder / "vocab.txt").write_text("\n".join(words))
        BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
        sizes = {"hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536, "vocab_size": WORDS}
        config = BertConfig(**sizes, num_hidden_layers=self.layers)
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
        BertModel(config).save_pretrained(folder)

    def bert(self) -> nn.Module:
        return BertModel.from_pretrained(self.folder, add_pooling_layer=False).to(self.device).train()

    def autocast(self) -> Any:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.on_gpu)

    def sentences(self) -> Any:
        """sentence-transformers' model of it, with the mean of its vectors."""
        return self.ready(SentenceTransformer(modules=[models.Transformer(str(self.folder)), models.Pooling(384)]))

    def ready(self, model: Any) -> Any:
        # as accelerate's prepare does
        model.forward = self.autocast()(model.forward)
        return model.to(self.device).train()

    def columns(self) -> Columns:
        columns = []
        for _ in range(2):
            lengths = torch.randint(SHORTEST, LONGEST + 1, (self.pairs, 1))
            mask = (torch.arange(LONGEST) < lengths).long()
            tokens = {"input_ids": torch.randint(5, WORDS, mask.shape) * mask, "attention_mask": mask}
            columns.append({name: x.to(self.device) for name, x in tokens.items()})
        return columns

    def step(
        self, module: Any, loss: Callable[[Columns], Tensor], backward: Callable[[Tensor], None] = Tensor.backward
    ) -> Measured:
        def run(columns: Columns) -> None:
            module.zero_grad()
            with self.autocast():
                value = loss(columns)
            backward(value)

        return run

    def of_sentences(self, make: Callable[..., nn.Module], *models: Any, **how: Any) -> Measured:
        """The step of a loss of sentence-transformers, or in its form."""
        loss = make(*models, mini_batch_size=self.sub_batch, **how)
        return self.step(loss, lambda columns: loss([dict(column) for column in columns], None))

    def beside_theirs(self, theirs: Any, ours: Any, *models: Any) -> Problem:
        return beside(SENTENCES, lambda make, **how: self.of_sentences(make, *models, **how), theirs, ours)

    def ranking(self) -> Problem:
        return self.beside_theirs(losses.CachedMultipleNegativesRankingLoss, CachedRankingLoss, self.sentences())

    def symmetric(self) -> Problem:
        theirs = losses.CachedMultipleNegativesSymmetricRankingLoss
        return self.beside_theirs(theirs, CachedSymmetricLoss, self.sentences())

    def gist(self) -> Problem:
        guide = self.sentences().eval().requires_grad_(False)
        return self.beside_theirs(losses.CachedGISTEmbedLoss, CachedGISTLoss, self.sentences(), guide)

    def multi_vector(self) -> Problem:
        from sentence_transformers import MultiVectorEncoder
        from sentence_transformers.base.modules import Dense, Normalize, Transformer
        from sentence_transformers.multi_vector_encoder.losses import CachedMultiVectorMultipleNegativesRankingLoss
        from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

        of_tokens = {"module_input_name": "token_embeddings"}
        linear = Dense(384, VECTOR, bias=False, activation_function=None, **of_tokens)
        modules = [Transformer(str(self.folder)), linear, Normalize(**of_tokens), MultiVectorMask()]
        theirs = partial(CachedMultiVectorMultipleNegativesRankingLoss, score_mini_batch_size=self.scored)
        return self.beside_theirs(theirs, CachedMultiVectorLoss, self.ready(MultiVectorEncoder(modules=modules)))

    def ours(self, make: Callable[..., Measured]) -> Problem:
        """Our steps by rows and by tokens, with and without second forwards."""
        rows, tokens = {"sub_batch": self.sub_batch}, {"sub_batch": None, "sub_batch_tokens": self.sub_batch * LONGEST}
        sizes = product(((OURS, rows), (BY_TOKENS, tokens)), (0, "auto"))
        return {(impl, retain): partial(make, **size, retain=retain) for (impl, size), retain in sizes}

    def arguments(self) -> TrainingArguments:
        return TrainingArguments(str(self.folder), bf16=self.on_gpu, use_cpu=not self.on_gpu, report_to=[])

    def trainer(self) -> Problem:
        """A Trainer of transformers with the formula as its `compute_loss`, which sees the whole batch at once."""

        class Plain(Trainer):
            def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Tensor:
                return formula(*(mean_pooled(model, **inputs[side]) for side in ("query", "key")))

        def made(kind: Any, **how: Any) -> Measured:
            trainer = kind(model=self.bert(), args=self.arguments(), train_dataset=[{}], **how)
            trainer.current_gradient_accumulation_steps = 1
            model = trainer.accelerator.prepare(trainer.model)

            def run(columns: Columns) -> None:
                model.zero_grad()
                trainer.training_step(model, dict(zip(("query", "key"), columns, strict=True)))

            return run

        return {("transformers", ""): partial(made, Plain), **self.ours(partial(made, ContrastileTrainer))}

    def lightning(self) -> Problem:
        """A LightningModule with the formula as its `training_step`, which sees the whole batch at once."""
        from lightning import LightningModule

        from contrastile.integrations.lightning import ContrastileMixin

        bench = self

        class Plain(LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.embedder = Embedder(bench.bert())

            def forward(self, **tokens: Tensor) -> Tensor:
                return self.embedder(**tokens)

            def training_step(self, batch: Columns, batch_idx: int) -> Tensor:
                del batch_idx
                return formula(*(self(**side) for side in batch))

        class Cached(ContrastileMixin, Plain):
            def log(self, *_: Any, **__: Any) -> None:
                """Log nothing outside of a Trainer."""

        def made(kind: Any, **how: Any) -> Measured:
            # settings of ours are attributes of the class
            module = type("Made", (kind,), how)()
            return self.step(module, lambda columns: module.training_step(columns, 0))

        return {("lightning", ""): partial(made, Plain), **self.ours(partial(made, Cached))}

    def loop(self, name: str, prepare: Callable[[nn.Module], Any], backward: Callable[[Any, Tensor], None]) -> Problem:
        """The steps of a loop of one's own: the formula of the whole batch, and `encode` with the loss."""

        def made(**how: Any) -> Measured:
            model = prepare(Embedder(self.bert()))

            def loss(columns: Columns) -> Tensor:
                if not how:
                    return formula(*(model(**x) for x in columns))
                return InfoNCELoss()(*(encode((model, "embed"), x, **how) for x in columns), SCALE)

            return self.step(model, loss, partial(backward, model))

        return {(name, ""): made, **self.ours(made)}

    def accelerate(self) -> Problem:
        from accelerate import Accelerator

        accelerator = Accelerator(mixed_precision="bf16" if self.on_gpu else "no", cpu=not self.on_gpu)
        return self.loop("accelerate", accelerator.prepare, lambda _, loss: accelerator.backward(loss))

    def deepspeed(self) -> Problem:
        """An engine of DeepSpeed's ZeRO stage 1, of one process."""
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": self.pairs, "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True, "gradient_clipping": 0.0,
            "torch_autocast": {"enabled": self.on_gpu, "dtype": "bfloat16"},
        }  # fmt: skip
        # its own collectives for a CPU would be compiled, for a minute
        deepspeed.ops.__compatible_ops__.clear()
        dist.init_process_group("nccl" if self.on_gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.until_measured.callback(dist.destroy_process_group)
        self.until_measured.enter_context(patch.dict(os.environ, LOCAL_RANK="0"))

        def prepare(model: nn.Module) -> Any:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

        def backward(engine: Any, loss: Tensor) -> None:
            engine.backward(loss)
            # gradients of a stage are those of one step
            engine.step()

        return self.loop("deepspeed", prepare, backward)

    def flag_embedding(self) -> Problem:
        """FlagEmbedding's model with `sub_batch_size`, and the subclass of its page."""
        from FlagEmbedding.finetune.embedder.encoder_only.base.modeling import BiEncoderOnlyEmbedderModel as Theirs

        how = {"temperature": 1 / SCALE, "sub_batch_size": self.sub_batch, "normalize_embeddings": True}
        made = partial(self.of_model, 1, how | {"sentence_pooling_method": "mean"})
        return beside("FlagEmbedding", made, Theirs, on_page("flag_embedding", "CachedModel"))

    def tevatron(self) -> Problem:
        """Tevatron's `DenseModel` of the registry, which sees the whole batch at once, and the subclass of its page."""
        from tevatron.modeling import DenseModel

        train = SimpleNamespace(negatives_x_device=False, per_device_train_batch_size=self.pairs)
        made = partial(self.of_model, 2, {"train_args": train, "data_args": SimpleNamespace(train_n_passages=1)})
        return beside("tevatron", made, DenseModel, on_page("tevatron", "CachedModel"))

    def of_model(self, towers: int, how: dict[str, Any], kind: Any, retain: Any = 0) -> Measured:
        """The step of a class of models, around one encoder as each of their towers, whose outputs have the loss."""
        model = kind(*[self.bert()] * towers, **how).train()
        model.sub_batch, model.retain = self.sub_batch, retain
        return self.step(model, lambda columns: model(*columns).loss)

    def colpali_engine(self) -> Problem:
        """colpali-engine's trainer, whose model sees the whole batch at once, and the subclass of its page."""
        from colpali_engine.loss.late_interaction_losses import ColbertLoss
        from colpali_engine.trainer.contrastive_trainer import ContrastiveTrainer as Theirs

        def made(kind: Any, retain: Any = 0) -> Measured:
            model = TokenVectors(self.bert()).to(self.device)
            trainer = kind(
                ColbertLoss(max_batch_size=self.pairs), True, model=model, args=self.arguments(), train_dataset=[{}],
                eval_dataset=None,
            )  # fmt: skip
            trainer.sub_batch, trainer.retain = self.sub_batch, retain

            def loss(columns: Columns) -> Tensor:
                sides = zip(("query_", "doc_"), columns, strict=True)
                return trainer.compute_loss(model, {side + name: x for side, xs in sides for name, x in xs.items()})

            return self.step(model, loss)

        return beside("colpali-engine", made, Theirs, on_page("colpali_engine", "CachedTrainer"))

    def pylate(self) -> Problem:
        """PyLate's `CachedContrastive`, and the subclass of its page."""
        from pylate.losses import CachedContrastive

        model = TokenVectors(self.bert()).to(self.device)
        theirs = partial(CachedContrastive, score_mini_batch_size=self.scored)

        def made(kind: Any, **attributes: Any) -> Measured:
            return self.of_sentences(type("Made", (kind,), attributes) if attributes else kind, model)

        return beside("pylate", made, theirs, on_page("pylate", "TiledContrastive"))


def beside(name: str, made: Callable[..., Measured], theirs: Any, ours: Any) -> Problem:
    """The step made of a library's class beside those of ours, without and with kept graphs."""
    kept = partial(made, ours, retain="auto")
    return {(name, ""): partial(made, theirs), (OURS, 0): partial(made, ours), (OURS, "auto"): kept}


# methods of `Bench`
DOORS = (
    "ranking", "symmetric", "gist", "multi-vector", "trainer", "lightning", "accelerate", "deepspeed",
    "flag-embedding", "tevatron", "pylate", "colpali-engine",
)  # fmt: skip


def on_page(page: str, name: str) -> Any:
    """The class that the last code of a page defines."""
    names = dict[str, Any]()
    *_, code = re.findall(r"^```python\n(.*?)^```", (PAGES / f"{page}.md").read_text(), re.DOTALL | re.MULTILINE)
    exec(code, names)
    return names[name]


def measure(bench: Bench, door: str, machine: Machine, report: Report, *, only_ours: bool = False) -> None:
    problem: Problem = getattr(bench, door.replace("-", "_"))()
    columns, steps, rows = bench.columns(), dict[str, Step](), dict[str, Row]()
    for (impl, retain), make in problem.items():
        if only_ours and not impl.startswith(OURS):
            continue
        name, row = f"{impl} {retain}", {
            "impl": impl, "loss": door, "model": f"bert-384-{bench.layers}", "batch": bench.pairs,
            "sub_batch": bench.sub_batch, "length": LONGEST, "retain": retain,
            "dtype": "bfloat16" if bench.on_gpu else "float32",
        }  # fmt: skip
        with report.failures(f"{door} by {impl}", judged=impl.startswith(OURS), row=row):
            step = partial(make(), columns)
            # compiles and allocates
            step()
            seconds, peak = machine.time_and_peak(step)
            rows[name] = row | {"ms": seconds * 1e3, "peak_bytes": peak}
            if seconds <= LONG_STEP:
                steps[name] = step
    timings = machine.race(steps)
    for name, row in rows.items():
        report.result(row | ({"ms": timings[name].ms} if name in timings else {}))


def main() -> None:
    pairs, sub_batch = (8192, 256) if torch.cuda.is_available() else (256, 32)
    words = {
        "doors": {"nargs": "*", "metavar": "DOOR", "help": f"of {', '.join(DOORS)} (default: all)"},
        "--pairs": {"type": int, "default": pairs, "help": f"pairs of texts (default: {pairs})"},
        "--ours": {"action": "store_true", "help": "leave out the other libraries' steps"},
        "--sub-batch": {"type": int, "default": sub_batch, "help": f"texts encoded at once (default: {sub_batch})"},
    }
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(0)
    with (
        tempfile.TemporaryDirectory() as folder,
        script(__doc__, TABLE, *PACKAGES, seconds=SECONDS, options=words) as (options, machine, report),
    ):
        bench = Bench(machine.device, options.pairs, options.sub_batch, Path(folder))
        for door in options.doors or DOORS:
            # a library that is not installed, or has no such loss
            with report.failures(door, judged=False), bench.until_measured:
                measure(bench, door, machine, report, only_ours=options.ours)


if __name__ == "__main__":
    main()
