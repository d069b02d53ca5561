"""Towers of timm and open_clip, or of stand-ins with their documented interface where these are not installed."""

import gzip
import json
import sys
import types

import pytest
import torch
from refusals import refusal
from safetensors.torch import save_file
from test_models_folders import Planted
from tiny_runs import tiny_recipe
from torch import nn

from contrastile.models import timm_openclip
from contrastile.models.text import load_tokenizer, train_tokenizer
from contrastile.models.timm_openclip import clip_tokenizer
from contrastile.models.towers import build_model
from contrastile.train.loop import run_recipe

CONFIG = {
    "embed_dim": 12,
    "vision_cfg": {"image_size": 16, "layers": 1, "width": 64, "patch_size": 8},
    "text_cfg": {"context_length": 9, "vocab_size": 60, "width": 16, "heads": 2, "layers": 1},
}
CLIP = {"kind": "open_clip", "config": CONFIG}


class FakeVisual(nn.Module):
    def __init__(self, embed_dim, image_size, width, **_):
        super().__init__()
        self.image_size, self.conv1, self.proj = image_size, nn.Conv2d(3, width, 8, 8), nn.Linear(width, embed_dim)

    def forward(self, pixels):
        assert pixels.shape[1:] == (3, self.image_size, self.image_size)
        return self.proj(self.conv1(pixels).mean(dim=(2, 3)))


class FakeText(nn.Module):
    """Reads every place, the padded ones too, and refuses texts of another length."""

    def __init__(self, embed_dim, context_length=77, vocab_size=49408, width=16, **_):
        super().__init__()
        self.token_embedding = nn.Embedding(vocab_size, width)
        self.positional_embedding = nn.Parameter(torch.randn(context_length, width))
        self.text_projection = nn.Parameter(torch.randn(width, embed_dim))

    def forward(self, tokens):
        return (self.token_embedding(tokens) * self.positional_embedding).mean(1) @ self.text_projection


class FakeClip(nn.Module):
    def __init__(self, embed_dim, vision_cfg, text_cfg, init_logit_bias=None):
        super().__init__()
        self.visual, self.text = FakeVisual(embed_dim, **vision_cfg), FakeText(embed_dim, **text_cfg)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))
        self.logit_bias = None if init_logit_bias is None else nn.Parameter(torch.tensor(float(init_logit_bias)))

    def encode_image(self, pixels):
        return self.visual(pixels)

    def encode_text(self, tokens):
        return self.text(tokens)


class FakeTokenizer:
    """The bytes, some pairs of them, and the two ends, numbered as CLIP's are."""

    def __init__(self):
        alphabet = [chr(code) for code in range(ord("!"), ord("~") + 1)]
        merges = [("l", "o"), ("lo", "w</w>"), ("n", "e")]
        words = [
            *alphabet,
            *(f"{one}</w>" for one in alphabet),
            *map("".join, merges),
            "<start_of_text>",
            "<end_of_text>",
        ]
        self.encoder = {word: number for number, word in enumerate(words)}
        self.bpe_ranks = {merge: rank for rank, merge in enumerate(merges)}


class FakeTimm(nn.Module):
    def __init__(self, in_chans, img_size, num_classes, width=8):
        super().__init__()
        self.img_size, self.patch = img_size, nn.Conv2d(in_chans, width, 4, 4)
        self.norm = nn.LayerNorm(width)
        if num_classes:
            self.head = nn.Linear(width, num_classes)
        self.pretrained_cfg = {"classifier": "head", "mean": (0.5, 0.4, 0.3), "std": (0.2, 0.2, 0.2)}

    def forward(self, pixels):
        assert self.img_size is None or pixels.shape[-1] == self.img_size, "doesn't match model"
        return self.norm(self.patch(pixels).mean(dim=(2, 3)))


@pytest.fixture
def open_clip(monkeypatch):
    module = types.ModuleType("open_clip")
    module.__spec__ = types.SimpleNamespace()
    module.CustomTextCLIP, module.SimpleTokenizer = FakeClip, FakeTokenizer
    module.get_model_config = lambda name: json.loads(json.dumps(CONFIG)) if name == "tiny" else None
    module.OPENAI_DATASET_MEAN, module.OPENAI_DATASET_STD = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)
    monkeypatch.setitem(sys.modules, "open_clip", module)
    return module


@pytest.fixture
def timm(monkeypatch):
    module = types.ModuleType("timm")
    module.__spec__ = types.SimpleNamespace()
    fixed = {"vit": True, "convnet": False}

    def create_model(name, pretrained, num_classes, in_chans, img_size=None, **more):
        assert not pretrained
        return FakeTimm(in_chans, img_size, num_classes, **more)

    module.create_model, module.is_model = create_model, fixed.__contains__
    module.models = types.SimpleNamespace(
        get_pretrained_cfg=lambda name: types.SimpleNamespace(fixed_input_size=fixed[name], input_size=(3, 24, 24))
    )
    module.data = types.SimpleNamespace(resolve_model_data_config=lambda model: model.pretrained_cfg)
    monkeypatch.setitem(sys.modules, "timm", module)
    return module


@pytest.fixture
def tokenizer():
    return train_tokenizer(["LATIN SMALL LETTER A", "GREEK BETA"], length=6)


def built(tokenizer, **settings):
    return build_model({"features": 12, "image_size": 16, "channels": 3, **settings}, tokenizer=tokenizer)


def features(model, tokenizer, channels=3):
    pixels = torch.linspace(0, 1, 2 * channels * 256).view(2, channels, 16, 16)
    return model.encode_image(pixels), model.encode_text(**tokenizer.tokenise(["LATIN A", "BETA"]))


# --- open_clip


@pytest.mark.parametrize(
    "settings", [{"both": CLIP}, {"image": CLIP}, {"text": CLIP}, {"image": CLIP, "text": CLIP}], ids=str
)
def test_towers_of_open_clip_combine_with_ours_and_are_rebuilt_from_settings(open_clip, tokenizer, settings):
    model = built(tokenizer, **settings).eval()
    image, text = features(model, tokenizer)
    assert image.shape == text.shape == (2, 12)
    (image.square().sum() + text.square().sum()).backward()
    again = build_model(json.loads(json.dumps(model.settings)), tokenizer=tokenizer).eval()
    again.load_state_dict(model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip((image, text), features(again, tokenizer), strict=True))


def saved_clip(open_clip, path, old=False, bias=None):
    model = open_clip.CustomTextCLIP(**CONFIG, **({} if bias is None else {"init_logit_bias": bias}))
    with torch.no_grad():
        model.logit_scale.fill_(3.0)
    state = {(name.removeprefix("text.") if old else name): value for name, value in model.state_dict().items()}
    if path.suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save({"epoch": 3, "state_dict": {f"module.{name}": value for name, value in state.items()}}, path)
    return model.eval()


@pytest.mark.parametrize(("file", "old"), [("w.safetensors", False), ("w.safetensors", True), ("w.pt", True)])
def test_a_checkpoint_gives_its_features_scale_and_bias(open_clip, tokenizer, tmp_path, file, old):
    original = saved_clip(open_clip, tmp_path / file, old, bias=-9.0)
    config = {**CONFIG, "init_logit_bias": 0.0}
    settings = {"kind": "open_clip", "config": config, "checkpoint": str(tmp_path / file)}
    model = built(tokenizer, both=settings).eval()
    pixels, tokens = torch.rand(2, 3, 16, 16), tokenizer.tokenise(["LATIN A", "BETA"])
    mean, std = (
        torch.tensor(value).view(3, 1, 1) for value in (open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD)
    )
    torch.testing.assert_close(model.encode_image(pixels), original.encode_image((pixels - mean) / std))
    whole = torch.nn.functional.pad(tokens["input_ids"], (0, 3), value=tokenizer.pad)
    torch.testing.assert_close(model.encode_text(**tokens), original.encode_text(whole))
    assert (model.logit_scale.item(), model.logit_bias.item()) == (3.0, -9.0)
    assert "checkpoint" not in model.settings["both"]


@pytest.mark.parametrize("side", ["both", "image", "text"])
def test_a_folder_has_shapes_weights_and_normalisation(open_clip, tokenizer, tmp_path, side):
    original = saved_clip(open_clip, tmp_path / "open_clip_model.safetensors", bias=-9.0)
    described = {
        "model_cfg": {**CONFIG, "init_logit_bias": 0.0},
        "preprocess_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3},
    }
    (tmp_path / "open_clip_config.json").write_text(json.dumps(described))
    model = built(tokenizer, **{side: {"kind": "open_clip", "folder": str(tmp_path)}}).eval()
    pixels, tokens = torch.rand(2, 3, 16, 16), tokenizer.tokenise(["LATIN A", "BETA"])
    if side != "text":
        torch.testing.assert_close(model.image.tower(pixels), original.encode_image((pixels - 0.5) / 0.5))
    if side != "image":
        whole = torch.nn.functional.pad(tokens["input_ids"], (0, 3), value=tokenizer.pad)
        torch.testing.assert_close(model.text.tower(**tokens), original.encode_text(whole))
    if side == "both":
        assert (model.logit_scale.item(), model.logit_bias.item()) == (3.0, -9.0)
    # a run is loaded without the folder
    again = build_model(json.loads(json.dumps(model.settings)), tokenizer=tokenizer).eval()
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.encode_image(pixels), model.encode_image(pixels))


def test_folders_without_a_model_or_its_weights_are_refused(open_clip, tokenizer, tmp_path):
    both = {"kind": "open_clip", "folder": str(tmp_path)}
    for content, sentence in (
        ("", "`folder` must hold a open_clip_config.json that can be read; got "),
        ("{}", f'`folder` must hold a open_clip_config.json with a model_cfg; got "{tmp_path}". Save the model there'),
        (
            json.dumps({"model_cfg": CONFIG}),
            "`folder` must hold one of open_clip_model.safetensors, model.safetensors, open_clip_pytorch_model.bin; "
            f'got "{tmp_path}". Save the model there with its weights.',
        ),
    ):
        (tmp_path / "open_clip_config.json").write_text(content)
        assert refusal(built, tokenizer, both=both).startswith(sentence)


def test_truncated_texts_are_padded_to_full_length(open_clip, tokenizer):
    model = built(tokenizer, both=CLIP).eval()
    tokens = tokenizer.tokenise(["LATIN A"])
    cut = {name: ids[:, :3] for name, ids in tokens.items()}
    torch.testing.assert_close(model.encode_text(**tokens), model.encode_text(**cut))


def test_a_name_has_the_shapes_that_open_clip_ships(open_clip, tokenizer):
    assert built(tokenizer, both={"kind": "open_clip", "name": "tiny"}).settings["both"]["config"] == CONFIG


REFUSED = {
    "an unknown name": ({"name": "huge"}, '`name` must be a model of open_clip; got "huge". '),
    "a name to be fetched": ({"name": "hf-hub:a/b"}, '`name` must be a model of open_clip; got "hf-hub:a/b". '),
    "a captioner": (
        {"config": {**CONFIG, "multimodal_cfg": {}}},
        "`config` must be a model of one image tower and one text tower; got multimodal_cfg. ",
    ),
    "half a model": (
        {"config": {"embed_dim": 3}},
        "`config` must be a model of one image tower and one text tower; got vision_cfg, text_cfg. ",
    ),
    "a text tower to be fetched": (
        {"config": {**CONFIG, "text_cfg": {"hf_model_name": "roberta-base"}}},
        "`text_cfg` must be a text tower of open_clip's own; got hf_model_name. ",
    ),
    "an image tower to be fetched": (
        {"config": {**CONFIG, "vision_cfg": {"timm_model_name": "hf-hub:a/b"}}},
        '`timm_model_name` must be a model of timm; got "hf-hub:a/b". ',
    ),
    "another size": (
        {"config": {**CONFIG, "vision_cfg": {**CONFIG["vision_cfg"], "image_size": 32}}},
        "`image_size` must be the 32 pixels of the image tower; got 16. Set data.image_size to it.",
    ),
    "too few words": (
        {"config": {**CONFIG, "text_cfg": {**CONFIG["text_cfg"], "vocab_size": 4}}},
        "`tokenizer` must have no more tokens than the text tower; got 8 for a text tower of 4. ",
    ),
    "too few places": (
        {"config": {**CONFIG, "text_cfg": {**CONFIG["text_cfg"], "context_length": 5}}},
        "`length` must be at most the 5 tokens of the text tower; got 6. Set model.tokenizer.length to it.",
    ),
    "a strange key": ({"config": {**CONFIG, "odd": 1}}, "`config` must describe a model of open_clip; got "),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_models_of_open_clip_are_refused(open_clip, tokenizer, case):
    settings, sentence = REFUSED[case]
    assert refusal(built, tokenizer, both={"kind": "open_clip", **settings}).startswith(sentence)


def test_the_tokenizer_of_clip_is_exact_and_works_without_open_clip(open_clip, tmp_path):
    tokenizer, words = clip_tokenizer(7), FakeTokenizer().encoder
    tokens = tokenizer.tokenise(["Low  new", "it\u2019s l0w, low, low, low"])
    begin, end = words["<start_of_text>"], words["<end_of_text>"]
    first = [begin, words["low</w>"], words["ne"], words["w</w>"], end, 0, 0]
    # cut, with an end
    second = [begin, words["i"], words["t</w>"], words["'"], words["s</w>"], words["l</w>"], end]
    assert tokens["input_ids"].tolist() == [first, second]
    assert tokens["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 0, 0], [1] * 7]
    tokenizer.save(tmp_path)
    open_clip.SimpleTokenizer = None
    again = load_tokenizer(tmp_path)
    assert (again.length, again.pad, again.vocabulary_size) == (7, 0, len(words))
    assert torch.equal(again.tokenise(["Low  new"])["input_ids"], tokens["input_ids"][:1])


def test_an_open_clip_without_the_end_tokens_is_refused(open_clip, monkeypatch):
    monkeypatch.setattr(timm_openclip, "CLIP_ENDS", ("<s>", "</s>"))
    with pytest.raises(
        ValueError, match=r"`open_clip` must have the tokens <s>, </s>; got <s>, </s>\. Another version"
    ):
        clip_tokenizer()


def test_a_recipe_of_open_clip_trains_evaluates_and_loads(open_clip, tmp_path):
    import contrastile

    words = len(FakeTokenizer().encoder)
    text = f"{{context_length=9, vocab_size={words}, width=16, heads=2, layers=1}}"
    both = f"{{kind='open_clip', config={{embed_dim=12, vision_cfg={{image_size=16, width=8}}, text_cfg={text}}}}}"
    (tmp_path / "clip.toml").write_text(
        "".join(
            (
                f"[model]\nboth = {both}\ntokenizer = {{length = 9}}\n[train]\nexamples = 64\nbatch = 16\n",
                f"[data]\nsource = '{tmp_path}/pictures.tsv'\nimage_size = 16\nchannels = 3\nheld_out = 0.3\n",
                f"max_bad_fraction = 0.05\ncache = '{tmp_path}/cache'\n",
            )
        )
    )
    tiny_recipe(tmp_path)
    from contrastile.train.recipe import load_any_recipe

    recipe = load_any_recipe(tmp_path / "clip.toml")
    assert (recipe.model.tokenizer.kind, recipe.model.tokenizer.length) == ("open_clip", 9)
    folder = run_recipe(recipe, tmp_path / "runs").folder
    assert contrastile.load(folder).encode_text(["letter A"]).shape == (1, 12)


# --- timm


@pytest.mark.parametrize(("name", "channels"), [("vit", 1), ("vit", 3), ("convnet", 3), ("vit.a_tag", 1)])
def test_an_image_tower_of_timm_has_the_size_of_the_images(timm, tokenizer, name, channels):
    model = built(tokenizer, image={"kind": "timm", "name": name, "config": {"width": 6}}, channels=channels).eval()
    image, _ = features(model, tokenizer, channels)
    assert image.shape == (2, 12)
    again = build_model(json.loads(json.dumps(model.settings)), tokenizer=tokenizer).eval()
    again.load_state_dict(model.state_dict())
    assert torch.equal(image, features(again, tokenizer, channels)[0])


@pytest.mark.parametrize("classes", [0, 5])
def test_a_checkpoint_of_timm_gives_its_features(timm, tokenizer, tmp_path, classes):
    original = FakeTimm(3, 24, classes).eval()
    save_file(original.state_dict(), tmp_path / "w.safetensors")
    image = {"kind": "timm", "name": "vit", "checkpoint": str(tmp_path / "w.safetensors")}
    model = built(tokenizer, image=image, image_size=24).eval()
    pixels, mean = torch.rand(2, 3, 24, 24), torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1)
    torch.testing.assert_close(model.image.tower(pixels), original((pixels - mean) / 0.2))
    grey = torch.rand(2, 1, 24, 24)
    assert torch.equal(model.encode_image(grey), model.encode_image(grey.expand(-1, 3, -1, -1)))


@pytest.mark.parametrize(
    ("settings", "more", "sentence"),
    [
        ({"name": "vitt"}, {}, '`name` must be a model of timm; got "vitt". '),
        ({"name": "hf-hub:timm/vit"}, {}, '`name` must be a model of timm; got "hf-hub:timm/vit". '),
        (
            {"name": "vit", "config": {"img_size": 32}},
            {},
            "`image_size` must be the 32 pixels of the image tower; got 16.",
        ),
        ({"name": "vit", "config": {"in_chans": 1}}, {}, "`channels` must be the 1 of the image tower; got 3."),
        (
            {"name": "vit", "config": {"depths": 2}},
            {},
            "`image` must have the settings of a tower of the kind timm; got ",
        ),
        (
            {"name": "vit", "config": {"checkpoint_path": "x.pth", "pretrained_cfg": {}}},
            {},
            "`config` must leave weights to checkpoint; got checkpoint_path, pretrained_cfg. ",
        ),
        ({"name": "vit", "checkpoint": "no.pt"}, {"image_size": 24}, '`checkpoint` must be a file; got "no.pt". '),
    ],
)
def test_invalid_models_of_timm_are_refused(timm, tokenizer, settings, more, sentence):
    assert refusal(built, tokenizer, image={"kind": "timm", **settings}, **more).startswith(sentence)


# --- weights


def test_code_in_a_checkpoint_is_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": Planted()}, "w.pt")
    assert refusal(timm_openclip.read_weights, "w.pt") == (
        '`checkpoint` must be safetensors, or tensors that torch.save wrote; got "w.pt". '
        "Anything else is not unpickled."
    )
    assert not (tmp_path / "planted").exists()


@pytest.mark.parametrize("content", [b"", b"not weights", gzip.compress(b"x", mtime=0)])
@pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
def test_a_file_without_tensors_is_refused(tmp_path, content, name):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match="`checkpoint` must be safetensors, or tensors"):
        timm_openclip.read_weights(tmp_path / name)


@pytest.mark.parametrize("side", ["image", "text", "both"])
def test_a_checkpoint_of_another_model_is_refused_by_open_clip(open_clip, tokenizer, tmp_path, side):
    save_file({}, tmp_path / "w.safetensors")
    assert refusal(built, tokenizer, **{side: {**CLIP, "checkpoint": str(tmp_path / "w.safetensors")}}) == (
        f'`checkpoint` must hold the weights of this model; got "{tmp_path}/w.safetensors": it lacks logit_scale, '
        "text.positional_embedding, text.text_projection and 5 more. "
        "Name the model that it is of, and the size of its images."
    )


def test_a_checkpoint_of_another_model_is_refused_by_timm(timm, tokenizer, tmp_path):
    save_file({"norm.weight": torch.ones(8)}, tmp_path / "w.safetensors")
    image = {"kind": "timm", "name": "vit", "checkpoint": f"{tmp_path}/w.safetensors"}
    sentence = refusal(built, tokenizer, image=image, image_size=24)
    assert "it lacks norm.bias, patch.bias, patch.weight. Name the model" in sentence


def test_a_checkpoint_without_names_is_refused(tmp_path):
    torch.save([torch.ones(2)], tmp_path / "w.pt")
    with pytest.raises(ValueError, match="`checkpoint` must hold tensors by name"):
        timm_openclip.read_weights(tmp_path / "w.pt")


def test_an_error_names_the_weights_that_differ(tmp_path):
    model, weights = nn.Linear(3, 2), {"weight": torch.ones(2, 4), "gain": torch.ones(1)}
    assert refusal(timm_openclip.load_weights_into, model, weights, "w.pt") == (
        '`checkpoint` must hold the weights of this model; got "w.pt": it lacks bias; it has besides gain; it has of '
        "another shape weight. Name the model that it is of, and the size of its images."
    )


def test_half_precision_weights_of_a_checkpoint_become_float32():
    model = nn.Linear(3, 2)
    half = {name: weight.detach().bfloat16() for name, weight in model.state_dict().items()}
    timm_openclip.load_weights_into(model, half, "w.pt")
    assert model.weight.dtype == model.bias.dtype == torch.float32
    assert torch.equal(model.weight, half["weight"].float())


# --- recipes


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "model.image={kind='timm', name='vit'}",
            "model.image.kind: needs the package timm, which is not installed; run: pip install timm",
        ),
        (
            "model.text={kind='open_clip', name='tiny'}",
            "model.text.kind: needs the package open_clip, which is not installed; run: pip install open_clip_torch",
        ),
    ],
)
def test_a_missing_package_is_one_line(tmp_path, monkeypatch, override, line):
    monkeypatch.setattr("contrastile.train.config.base.find_spec", lambda name: None)
    assert refusal(tiny_recipe, tmp_path, override) == f"{override}: {line}"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("model.image={kind='timm'}", 'model.image.name: missing; model.image.kind = "timm" needs it'),
        (
            "model.image={kind='timm', name='vit', checkpoint='w.pt'}",
            'model.image.checkpoint: must be a file; there is no "w.pt"',
        ),
        ("model.text={kind='open_clip'}", "model.text: must have either name or config, and not both"),
        (
            "model.text={kind='open_clip', folder='FOLDER', config={}}",
            "model.text.folder: must be given alone, it has all of them; got config beside it",
        ),
        (
            "model.text={kind='open_clip', folder='FOLDER'}",
            'model.text.folder: must hold a open_clip_config.json with a model_cfg; got "FOLDER". Save the model there '
            "again.",
        ),
        (
            "model.text={kind='open_clip', folder='FOLDER/words'}",
            'model.tokenizer.folder: must be given with the text encoder in "FOLDER/words": its weights know its own '
            "tokens",
        ),
        (
            "model.text={kind='open_clip', name='tiny'}",
            'model.tokenizer.kind: must be "open_clip", or a folder, for a text tower of open_clip; got "words"',
        ),
    ],
)
def test_invalid_recipes_of_open_clip_and_timm_are_refused(open_clip, timm, tmp_path, override, line):
    # the recipe names a tokenizer of words
    tokenizer = "model.tokenizer={kind='words', length=4}" if "folder" not in override else "model.tokenizer={length=4}"
    (tmp_path / "open_clip_config.json").write_text("{}")
    if "words" in override:
        (tmp_path / "words").mkdir()
        named = {"model_cfg": {**CONFIG, "text_cfg": {"hf_tokenizer_name": "a/b"}}}
        (tmp_path / "words" / "open_clip_config.json").write_text(json.dumps(named))
    assert refusal(tiny_recipe, tmp_path, override.replace("FOLDER", str(tmp_path)), tokenizer).endswith(
        line.replace("FOLDER", str(tmp_path))
    )


# --- the packages themselves


def test_the_real_timm_gives_the_same_features(tokenizer, tmp_path):
    timm = pytest.importorskip("timm")
    for name, more in (("vit_tiny_patch16_224", {"img_size": 32, "depth": 2}), ("resnet10t", {})):
        original = timm.create_model(name, pretrained=False, **more).eval()
        torch.save(original.state_dict(), tmp_path / "w.pt")
        image = {"kind": "timm", "name": name, "checkpoint": str(tmp_path / "w.pt"), "config": more}
        model = built(tokenizer, image=image, image_size=32).eval()
        told = timm.data.resolve_model_data_config(original)
        mean, std = (torch.tensor(told[key]).view(3, 1, 1) for key in ("mean", "std"))
        pixels = torch.rand(2, 3, 32, 32)
        expected = original.forward_head(original.forward_features((pixels - mean) / std), pre_logits=True)
        torch.testing.assert_close(model.image.tower(pixels), expected)
        fresh = built(tokenizer, image={"kind": "timm", "name": name, "config": {}}, image_size=32, channels=1)
        fresh.encode_image(torch.rand(2, 1, 32, 32)).sum().backward()
        again = build_model(json.loads(json.dumps(model.settings)), tokenizer=tokenizer).eval()
        again.load_state_dict(model.state_dict())
        assert torch.equal(again.encode_image(pixels), model.encode_image(pixels))


def test_the_real_open_clip_gives_the_same_features(tokenizer, tmp_path):
    real = pytest.importorskip("open_clip")
    for file, old in (("w.safetensors", False), ("w.pt", True)):
        config = {**CONFIG, "init_logit_bias": -5.0}
        original = (real.CLIP if old else real.CustomTextCLIP)(**config).eval()
        state = original.state_dict()
        save_file(state, tmp_path / file) if not old else torch.save({"state_dict": state}, tmp_path / file)
        both = {"kind": "open_clip", "config": config, "checkpoint": str(tmp_path / file)}
        model = built(tokenizer, both=both).eval()
        pixels, tokens = torch.rand(2, 3, 16, 16), tokenizer.tokenise(["LATIN A", "BETA"])
        mean, std = (torch.tensor(value).view(3, 1, 1) for value in (real.OPENAI_DATASET_MEAN, real.OPENAI_DATASET_STD))
        torch.testing.assert_close(model.encode_image(pixels), original.encode_image((pixels - mean) / std))
        whole = torch.nn.functional.pad(tokens["input_ids"], (0, 3), value=tokenizer.pad)
        torch.testing.assert_close(model.encode_text(**tokens), original.encode_text(whole))
        assert model.logit_bias.item() == -5.0
    assert timm_openclip.OpenClip(name="ViT-B-32").shapes["embed_dim"] == 512


def test_the_real_tokenizer_of_clip_gives_the_same_tokens():
    real = pytest.importorskip("open_clip")
    # fmt: off
    texts = ["a photo of a cat.",
             "It\u2019s 2024!! “Zürich”  naïve café", "日本語 emoji 🙂", "don't we'll I'm", "x" * 300, "",
             "snake_case, A/B-test: 100% (ok) <b>", "word " * 100]
    # fmt: on
    assert torch.equal(clip_tokenizer().tokenise(texts)["input_ids"], real.SimpleTokenizer()(texts))
