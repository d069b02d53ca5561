"""The way out of a run of images and texts: both its towers as one folder of open_clip or of transformers.

Called by `contrastile export`, beside `export.py`, which has retrievers and the model card. The library loads each
folder once before it is there: tokens and features of a trial batch are the run's, bit for bit, or an error says so.
"""

import json
import tempfile
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from contrastile import __version__, load
from contrastile._errors import invalid, written_to
from contrastile.integrations.export import filled_card, refuse_existing, save_tokenizer
from contrastile.models.pretrained import TRIAL_TEXT, Library
from contrastile.models.remote_code import OPEN_CLIP
from contrastile.models.timm_openclip import WEIGHTS_FILES
from contrastile.train.run import Run

# images and texts of the trial batch
TRIAL = 2
TEXTS = [TRIAL_TEXT, "a"]

SUMMARY = """Features of images and of texts, {features} numbers each, trained with contrastile {version} and exported
for {library}. They are compared by cosine."""

USAGE = {
    "open_clip": """```python
import open_clip
from PIL import Image

# "hf-hub:OWNER/NAME" once it is on the hub
model, transform = open_clip.create_model_from_pretrained("local-dir:{name}")
image = model.encode_image(transform(Image.open("a.png"){grey})[None], normalize=True)
text = model.encode_text(open_clip.get_tokenizer("local-dir:{name}")(["a text"]), normalize=True)
cosines = image @ text.T
```""",
    "transformers": """```python
from PIL import Image
from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

model, tokenizer = AutoModel.from_pretrained("{name}"), AutoTokenizer.from_pretrained("{name}")
pixels = AutoImageProcessor.from_pretrained("{name}")(Image.open("a.png"){grey}, return_tensors="pt")
tokens = tokenizer(["a text"], padding="max_length", truncation=True, return_tensors="pt")
image = model.get_image_features(**pixels).pooler_output
text = model.get_text_features(input_ids=tokens.input_ids, attention_mask=tokens.attention_mask).pooler_output
cosines = (image / image.norm()) @ (text / text.norm()).T
```""",
}


def export_pair(folder: Path, library: str, target: Path) -> list[Path]:
    """Write the towers of a run as a folder of `library`, and return it.

    Raises ValueError for towers that the library does not have, for features that it computes otherwise, and for a
    target that exists.
    """
    run: Any = load(folder, device="cpu")
    write, read = {"open_clip": (_write_open_clip, _read_open_clip), "transformers": (_write, _read)}[library]
    refuse_existing(target)
    with written_to(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".export-", dir=target.parent) as temporary:
            made = Path(temporary, target.name)
            made.mkdir()
            write(run, made)
            _compare(run, library, *read(made, run))
            (made / "README.md").write_text(_card(run, folder, library, target.name), encoding="utf-8")
            made.rename(target)
    return [target]


def _check_library(run: Run, library: str, remedy: str) -> None:
    """Raise ValueError unless both towers are models of the library."""
    settings = run.model.settings
    kinds = [settings[side]["kind"] for side in (("both",) if settings["both"] else ("image", "text"))]
    if set(kinds) != {library}:
        raise invalid("run", f"have towers that are a model of {library}", " and ".join(kinds), remedy)


def _normalisation(run: Run) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of the pixels, one number per channel."""
    tower: Any = run.model.image.tower
    mean, std = (x.flatten().tolist() * (1 if x.numel() > 1 else tower.channels) for x in (tower.mean, tower.std))
    return mean, std


# --- open_clip


def _write_open_clip(run: Run, target: Path) -> None:
    """Write the folder that `open_clip.create_model("local-dir:...")` reads, which is that of the hub."""
    from safetensors.torch import save_file

    both = run.model.settings["both"] or {}
    _check_library(run, "open_clip", 'Train with model.both = {kind = "open_clip", name = "ViT-B-16"}, or its config.')
    # the class with both towers as modules of their own
    config = {**deepcopy(both["config"]), "custom_text": True}
    config.pop("init_logit_bias", None)
    shape = [1] * bool(config.get("nonscalar_logit_scale"))
    modules: dict[str, Any] = {"visual": run.model.image.tower, "text": run.model.text.tower}
    weights = {f"{name}.{key}": x for name, tower in modules.items() for key, x in tower.model.state_dict().items()}
    weights["logit_scale"] = run.model.logit_scale.detach().reshape(shape)
    if run.model.logit_bias is not None:
        config["init_logit_bias"] = run.model.logit_bias.item()
        weights["logit_bias"] = run.model.logit_bias.detach().reshape(shape)
    if run.recipe.model.tokenizer.folder is not None or run.recipe.model.tokenizer.kind != "open_clip":
        save_tokenizer(run.tokenizer, target)
        # a local folder has its own tokenizer, whatever the name
        config["text_cfg"]["hf_tokenizer_name"] = target.name
    # a tied weight has one storage, which the format refuses
    save_file({name: x.clone().contiguous() for name, x in weights.items()}, target / WEIGHTS_FILES[0])
    mean, std = _normalisation(run)
    pixels = {"mean": mean, "std": std, "interpolation": "bicubic", "resize_mode": "shortest"}
    described = json.dumps({"model_cfg": config, "preprocess_cfg": pixels}, indent=2)
    (target / OPEN_CLIP).write_text(described + "\n", encoding="utf-8")


def _read_open_clip(target: Path, run: Run) -> tuple[Any, Callable[[Tensor], Tensor], Callable[[Any], Tensor], Any]:
    """The tokens of the trial texts, and the two towers, as open_clip has them."""
    import open_clip

    if not hasattr(open_clip.factory, "parse_model_name"):
        remedy = 'Run: pip install "open_clip_torch>=3".'
        raise invalid("open_clip", "be of version 3, which reads local folders", open_clip.__version__, remedy)
    model = open_clip.create_model(f"local-dir:{target}").eval()
    tokens = open_clip.get_tokenizer(f"local-dir:{target}")(TEXTS, context_length=run.tokenizer.length)
    # texts of the run end after its own length, and are padded to the model's
    words = nn.functional.pad(tokens, (0, model.context_length - tokens.shape[1]), value=run.tokenizer.pad)
    return (tokens, run.tokenizer.tokenise(TEXTS)["input_ids"]), model.encode_image, model.encode_text, words


# --- transformers


def _write(run: Run, target: Path) -> None:
    """Write a CLIP, a SigLIP or a VisionTextDualEncoder of transformers, its tokenizer and its image processor."""
    remedy = 'Train with model.both, or model.image and model.text, of the kind "transformers".'
    _check_library(run, "transformers", remedy)
    image: Any = run.model.image.tower
    text: Any = run.model.text.tower
    poolings, whole = [image.pooling, text.pooling], run.model.settings["both"] is not None
    if set(poolings) != {"pooler"}:
        remedy = 'Train with pooling = "pooler" in model.image and in model.text.'
        if whole:
            remedy = "Train with a tokenizer that writes the model's end token: model.tokenizer.folder."
        rule = "have features that are the poolers of their models"
        raise invalid("run", rule, " and ".join(poolings), remedy)
    model = _whole(run) if whole else _joined(run.model.image, run.model.text)
    with torch.no_grad():
        model.logit_scale.copy_(run.model.logit_scale)
        if getattr(model, "logit_bias", None) is not None:
            model.logit_bias.fill_(0.0 if run.model.logit_bias is None else run.model.logit_bias.item())
    model.save_pretrained(target)
    save_tokenizer(run.tokenizer, target)
    size, (mean, std) = run.recipe.data.image_size, _normalisation(run)
    processor = {
        "image_processor_type": "CLIPImageProcessor", "do_convert_rgb": image.channels == 3, "do_resize": True,
        "size": {"shortest_edge": size}, "resample": 3, "do_center_crop": True,
        "crop_size": {"height": size, "width": size}, "do_rescale": True, "do_normalize": True,
        "image_mean": mean, "image_std": std,
    }  # fmt: skip
    (target / "preprocessor_config.json").write_text(json.dumps(processor, indent=2) + "\n", encoding="utf-8")


def _whole(run: Run) -> Any:
    """The model of `model.both` with the run's weights."""
    model: Any = Library(config=run.model.settings["both"]["config"]).build()
    image: Any = run.model.image
    text: Any = run.model.text
    model.vision_model, model.text_model = image.tower.model, text.tower.model
    if hasattr(model, "visual_projection"):
        model.visual_projection, model.text_projection = image.projection, text.projection
    return model


def _joined(image: Any, text: Any) -> Any:
    """A VisionTextDualEncoder of two towers, each with its projection."""
    from transformers import VisionTextDualEncoderConfig, VisionTextDualEncoderModel

    for side in (image, text):
        features, kind = side.projection.in_features, type(side.tower.model).__name__
        if getattr(side.tower.model.config, "hidden_size", None) != features:
            got, remedy = f"{features} of {kind}", "Train with transformers as image and text tower."
            raise invalid("run", "have towers with features of their hidden_size", got, remedy)
    config = VisionTextDualEncoderConfig.from_vision_text_configs(
        image.tower.model.config, text.tower.model.config, projection_dim=image.projection.out_features
    )
    model: Any = VisionTextDualEncoderModel(config, image.tower.model, text.tower.model)
    model.visual_projection, model.text_projection = image.projection, text.projection
    return model


def _read(target: Path, run: Run) -> tuple[Any, Callable[[Tensor], Tensor], Callable[[Any], Tensor], Any]:
    """The tokens of the trial texts, and the two towers, as transformers has them."""
    from transformers import AutoModel, AutoTokenizer

    model: Any = AutoModel.from_pretrained(target, local_files_only=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(target, local_files_only=True)
    tokens = tokenizer(TEXTS, padding="max_length", truncation=True, return_tensors="pt")
    own = run.tokenizer.tokenise(TEXTS)
    # SigLIP's tokenizer returns no mask, for which the run has ones
    tokens = {name: tokens.get(name, own[name]) for name in own}

    def image(pixels: Tensor) -> Tensor:
        return _pooled(model.get_image_features(pixel_values=pixels))

    def text(words: dict[str, Tensor]) -> Tensor:
        return _pooled(model.get_text_features(**words))

    return (tokens["input_ids"], own["input_ids"]), image, text, tokens


def _pooled(output: Any) -> Tensor:
    """The features, which some versions return in a larger output."""
    return getattr(output, "pooler_output", output)


# --- both


@torch.no_grad()
def _compare(
    run: Run, library: str, tokens: tuple[Tensor, Tensor], image: Callable[..., Tensor], text: Callable[..., Tensor],
    words: Any,
) -> None:  # fmt: skip
    """Raise ValueError where tokens or features of the trial batch are not the run's, bit for bit."""
    data, tower = run.recipe.data, cast(Any, run.model.image.tower)
    shape = (TRIAL, data.channels, data.image_size, data.image_size)
    pixels = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    normalised = (pixels.expand(-1, tower.channels, -1, -1) - tower.mean) / tower.std
    same = {
        "tokens": torch.equal(*tokens),
        "features of images": torch.equal(image(normalised), run.model.encode_image(pixels)),
        "features of texts": torch.equal(text(words), _features(run)),
    }
    if others := [name for name, equal in same.items() if not equal]:
        remedy = "Use the run with contrastile.load."
        raise invalid("run", f"give the same tokens and features in {library}", f"other {' and '.join(others)}", remedy)


def _features(run: Run) -> Tensor:
    """The run's own features of `TEXTS`."""
    tokens = run.tokenizer.tokenise(TEXTS)
    return run.model.encode_text(tokens["input_ids"], tokens["attention_mask"])


def _card(run: Run, folder: Path, library: str, name: str) -> str:
    """The model card: use, form and training."""
    data, model = run.recipe.data, run.model
    with torch.no_grad():
        features = _features(run).shape[1]
    scale, bias = model.logit_scale.exp().item(), model.logit_bias
    grey = ', converted to grey first: `picture.convert("L")`' if data.channels == 1 else ""
    return filled_card(
        folder,
        library,
        task="zero-shot-image-classification",
        title=Path(folder).name,
        summary=SUMMARY.format(features=features, version=__version__, library=library),
        usage=USAGE[library].format(name=name, grey='.convert("L")' if data.channels == 1 else ""),
        rows={
            "pictures": f"the middle square, {data.image_size} pixels wide, bicubic{grey}",
            "longest text": f"{run.tokenizer.length} tokens in training",
            "scale of the cosine": f"{scale:.6g}",
            "bias": "none" if bias is None else f"{bias.item():.6g}",
        },
    )
