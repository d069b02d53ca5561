"""Towers by configuration: every kind builds, trains and is rebuilt from its settings; invalid ones are refused."""

import json
import logging

import pytest
import torch
from refusals import refusal

from contrastile.models.text import train_tokenizer
from contrastile.models.towers import build_model

TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
VIT = {"kind": "transformers", "config": {"model_type": "vit", "patch_size": 8, **TINY}}
RESNET = {
    "kind": "transformers",
    "config": {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
}
BERT = {"kind": "transformers", "config": {"model_type": "bert", **TINY}}
TEXT = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, "vocab_size": 40, **TINY}
VISION = {"image_size": 32, "patch_size": 8, **TINY}
CLIP = {
    "kind": "transformers",
    "config": {"model_type": "clip", "projection_dim": 24, "vision_config": VISION, "text_config": TEXT},
}
SIGLIP = {"kind": "transformers", "config": {"model_type": "siglip", "vision_config": VISION, "text_config": TEXT}}

KINDS = {
    "small": {},
    "vit and bert": {"image": VIT, "text": BERT},
    "first places": {"image": {**VIT, "pooling": "cls"}, "text": {**BERT, "pooling": "cls"}},
    "poolers": {"image": {**VIT, "pooling": "pooler"}, "text": {**BERT, "pooling": "pooler"}},
    "a map, not places": {"image": RESNET},
    "clip": {"both": CLIP},
    "siglip": {"both": SIGLIP},
}


@pytest.fixture(autouse=True)
def _quiet_library():
    logging.getLogger("transformers").setLevel(logging.ERROR)


def test_uint8_pixels_are_scaled_by_the_tower():
    tokenizer = train_tokenizer(["a b c"], length=4)
    model = build_model({"features": 8, "image_size": 16, "channels": 3}, tokenizer=tokenizer)
    pictures = torch.randint(0, 256, (5, 3, 16, 16), dtype=torch.uint8)
    assert torch.equal(model.encode_image(pictures), model.encode_image(pictures.float() / 255))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_pixels_take_the_precision_of_their_tower(dtype, tokenizer):
    """The scale stays in float32 where only the tower is made smaller."""
    model = build_model({"features": 8, "image_size": 16, "channels": 1}, tokenizer=tokenizer)
    model.image.to(dtype)
    for pixels in (torch.rand(2, 1, 16, 16), torch.zeros(2, 1, 16, 16, dtype=torch.uint8)):
        assert model.encode_image(pixels).dtype == dtype


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["LATIN SMALL LETTER A", "GREEK CAPITAL LETTER BETA"], length=6)


def built(tokenizer, **settings):
    return build_model({"features": 20, **settings}, tokenizer=tokenizer)


def both_features(model, tokenizer):
    pixels = torch.linspace(0, 1, 3 * 32 * 32).view(3, 1, 32, 32)
    return model.encode_image(pixels), model.encode_text(**tokenizer.tokenise(["LATIN A", "BETA", "GREEK LETTER"]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_rebuilt_from_its_settings_and_both_sides_have_one_size(kind, tokenizer):
    model = built(tokenizer, **KINDS[kind]).eval()
    again = build_model(json.loads(json.dumps(model.settings)), tokenizer=tokenizer).eval()
    again.load_state_dict(model.state_dict())
    for first, second in zip(both_features(model, tokenizer), both_features(again, tokenizer), strict=True):
        assert torch.equal(first, second)
        assert first.shape == (3, {"clip": 24, "siglip": 16}.get(kind, 20))


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_trains_under_bfloat16_autocast(kind, tokenizer):
    model = built(tokenizer, **KINDS[kind])
    with torch.autocast("cpu", torch.bfloat16):
        image, text = both_features(model, tokenizer)
    (image.float() * text.float()).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(gradients) > 5
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_scale_and_bias_start_at_the_given_values(tokenizer):
    model = built(tokenizer, scale=20.0, bias=-10.0)
    assert model.logit_scale.exp().item() == pytest.approx(20.0)
    assert model.logit_bias.item() == -10.0
    assert model.logit_scale.shape == model.logit_bias.shape == ()


def test_by_default_the_scale_is_that_of_clip_without_bias(tokenizer):
    for settings in ({}, {"both": CLIP}, {"both": SIGLIP}):
        model = built(tokenizer, **settings)
        assert model.logit_scale.exp().item() == pytest.approx(1 / 0.07)
        assert model.logit_bias is None


def test_grey_images_fit_a_model_of_three_channels(tokenizer):
    image = {"kind": "transformers", "config": {**VIT["config"], "num_channels": 3}}
    model = built(tokenizer, image=image).eval()
    grey = torch.rand(2, 1, 32, 32)
    assert torch.equal(model.encode_image(grey), model.encode_image(grey.expand(-1, 3, -1, -1)))


def test_a_model_of_one_channel_is_normalised_with_the_mean_over_channels(tokenizer):
    config, mean, std = {**VIT["config"], "num_channels": 1}, [0.1, 0.2, 0.6], [0.1, 0.2, 0.3]
    tower = built(tokenizer, image={**VIT, "config": config, "mean": mean, "std": std}).eval().image.tower
    grey = torch.rand(2, 1, 32, 32)
    states = tower.model(pixel_values=(grey - 0.3) / 0.2).last_hidden_state
    torch.testing.assert_close(tower(grey), states.mean(dim=1))


@pytest.fixture(scope="module")
def saved_clip(tmp_path_factory):
    from transformers import CLIPConfig, CLIPModel

    described = {key: value for key, value in CLIP["config"].items() if key != "model_type"}
    model = CLIPModel(CLIPConfig(**described)).eval()
    with torch.no_grad():
        model.logit_scale.fill_(3.0)
    folder = tmp_path_factory.mktemp("clip")
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.4] * 3, "image_std": [0.2] * 3}))
    return model, str(folder)


def test_a_saved_clip_gives_the_same_features_and_scale(saved_clip, tokenizer):
    original, folder = saved_clip
    model = built(tokenizer, both={"kind": "transformers", "folder": folder}, channels=3).eval()
    # the texts end as CLIP's own tokenizer ends them
    ids = torch.tensor([[5, 6, 7, 1, 0, 0], [5, 1, 0, 0, 0, 0]])
    pixels, tokens = torch.rand(2, 3, 32, 32), {"input_ids": ids, "attention_mask": (ids > 0).long()}
    expected = original.get_image_features(pixel_values=(pixels - 0.4) / 0.2).pooler_output
    torch.testing.assert_close(model.encode_image(pixels), expected)
    torch.testing.assert_close(model.encode_text(**tokens), original.get_text_features(**tokens).pooler_output)
    assert model.logit_scale.item() == pytest.approx(3.0)


@pytest.mark.parametrize("text", [TEXT, {**TEXT, "eos_token_id": 2}, {**TEXT, "eos_token_id": 39}])
def test_clip_pools_the_last_token_where_the_tokenizer_writes_no_end(tokenizer, text):
    config = {**CLIP["config"], "text_config": text}
    model = built(tokenizer, both={"kind": "transformers", "config": config}).eval()
    for later in (1, 2):
        tokens = tokenizer.tokenise(["LATIN SMALL BETA", "LATIN SMALL BETA"])
        assert tokens["attention_mask"].sum() == 6
        tokens["input_ids"][1, later] = min({3, 4} - {int(tokens["input_ids"][0, later])})
        one, other = model.encode_text(**tokens)
        assert (one - other).abs().max() > 1e-3


def test_clip_pools_the_end_token_where_the_tokenizer_writes_one(tokenizer):
    class Ending:
        length, pad, vocabulary_size = 6, 0, 40

        def tokenise(self, texts):
            ids = torch.tensor([[7, 8, 9, 1, 0, 0]] * len(texts))
            return {"input_ids": ids, "attention_mask": (ids > 0).long()}

    assert built(tokenizer, both=CLIP).text.tower.pooling == "last"
    assert built(Ending(), both=CLIP).text.tower.pooling == "pooler"


@pytest.mark.parametrize("kind", ["clip", "siglip", "vit and bert", "poolers"])
def test_features_do_not_depend_on_padding(kind, tokenizer):
    model = built(tokenizer, **KINDS[kind]).eval()
    tokens = tokenizer.tokenise(["LATIN A", "BETA BETA BETA"])
    short = {name: ids[:, :3] for name, ids in tokens.items()}
    torch.testing.assert_close(model.encode_text(**short), model.encode_text(**tokens))


def test_a_saved_clip_is_rebuilt_without_its_folder(saved_clip, tokenizer):
    model = built(tokenizer, both={"kind": "transformers", "folder": saved_clip[1]}).eval()
    assert saved_clip[1] not in json.dumps(model.settings)
    again = build_model(model.settings, tokenizer=tokenizer).eval()
    again.load_state_dict(model.state_dict())
    assert torch.equal(both_features(model, tokenizer)[0], both_features(again, tokenizer)[0])


def dtypes(model):
    return {weight.dtype for weight in model.state_dict().values() if weight.is_floating_point()}


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_weights_of_a_folder_are_trained_in_float32(tokenizer, tmp_path, half):
    from transformers import BertConfig, BertModel, CLIPConfig, CLIPModel, ViTConfig, ViTModel

    described = {key: value for key, value in CLIP["config"].items() if key != "model_type"}
    models = {
        "image": ViTModel(ViTConfig(image_size=32, num_channels=1, patch_size=8, **TINY)),
        "text": BertModel(BertConfig(vocab_size=40, **TINY)),
        "both": CLIPModel(CLIPConfig(**described)),
    }
    towers = {}
    for side, saved in models.items():
        saved.to(half).save_pretrained(tmp_path / side)
        towers[side] = {"kind": "transformers", "folder": str(tmp_path / side)}
    assert json.loads((tmp_path / "text" / "config.json").read_text())["dtype"] == str(half).removeprefix("torch.")
    separate = built(tokenizer, image=towers["image"], text=towers["text"])
    state = separate.state_dict()
    for side in ("image", "text"):
        for name, weight in models[side].named_parameters():
            assert torch.equal(state[f"{side}.tower.model.{name}"], weight.float())
    for model in (separate, built(tokenizer, both=towers["both"])):
        assert dtypes(model) == {torch.float32}
        assert dtypes(build_model(model.settings, tokenizer=tokenizer)) == {torch.float32}


def test_settings_with_half_precision_are_built_in_float32(tokenizer):
    noted = {**BERT["config"], "transformers_version": "5.0.0", "dtype": "bfloat16"}
    assert dtypes(built(tokenizer, text={"kind": "transformers", "config": noted})) == {torch.float32}


def test_other_entries_of_a_folder_are_saved_with_the_run(tokenizer, tmp_path):
    from transformers import ViTConfig, ViTModel

    ViTModel(ViTConfig(image_size=32, num_channels=1, patch_size=8, **TINY)).save_pretrained(tmp_path)
    told = json.loads((tmp_path / "config.json").read_text())
    # as published folders have them, written by other versions of the library
    (tmp_path / "config.json").write_text(json.dumps({**told, "gradient_checkpointing": False}))
    model = built(tokenizer, image={"kind": "transformers", "folder": str(tmp_path)})
    assert model.settings["image"]["config"]["gradient_checkpointing"] is False
    again = build_model(model.settings, tokenizer=tokenizer)
    again.load_state_dict(model.state_dict())


def test_a_key_by_its_older_name_is_accepted(tokenizer):
    sizes = {**TINY, "num_key_value_heads": 2, "max_position_embeddings": 16}
    model = built(tokenizer, text=library(model_type="llama", rope_theta=77.0, **sizes))
    assert model.text.tower.model.config.rope_parameters["rope_theta"] == 77.0
    # a decoder keeps no keys and values for a text that goes on
    outputs = []
    model.text.tower.model.register_forward_hook(lambda *call: outputs.append(call[-1]))
    model.encode_text(**tokenizer.tokenise(["LETTER A"]))
    assert outputs[0].past_key_values is None


def library(**config):
    return {"kind": "transformers", "config": config}


REFUSED = {
    "an unknown key": (
        {"imgae": {}},
        "`settings` must have keys among features, image_size, channels, image, text, both, scale, bias; got imgae. "
        "Leave the others out.",
    ),
    "an unknown kind": (
        {"image": {"kind": "convnet"}},
        "`image.kind` must be one of conv, transformers, timm, open_clip; got convnet. See the recipes for examples.",
    ),
    "a setting of another kind": (
        {"text": {"kind": "words", "depth": 3}},
        "`text` must have the settings of a tower of the kind words; got {'depth': 3}. ",
    ),
    "a key that its model does not read": (
        {"image": library(model_type="vit", hidden_sizee=8)},
        "`config` must have keys that a vit reads; got hidden_sizee. Did you mean hidden_size?",
    ),
    "a key of one side of a model for both": (
        {"image": None, "text": None, "both": {"config": {"model_type": "clip", "text_config": {"zzz": 8}}}},
        "`config.text_config` must have keys that a clip_text_model reads; got zzz. Leave it out.",
    ),
    "weights of half precision": (
        {"image": library(model_type="vit", dtype="bfloat16")},
        '`config` must have weights of float32; got dtype = "bfloat16". Leave it out, and set train.precision.',
    ),
    "weights of half precision by the older name": (
        {"image": library(model_type="vit", torch_dtype="float16")},
        '`config` must have weights of float32; got torch_dtype = "float16". Leave it out, and set train.precision.',
    ),
    "sizes that do not go together": (
        {"image": library(model_type="vit", hidden_size=7)},
        "`config` must describe a model of transformers; got vit. ",
    ),
    "a type that there is not": (
        {"image": library(model_type="vitt")},
        "`config` must describe a model of transformers; got vitt. ",
    ),
    "a pooler that there is not": (
        {"text": {"kind": "transformers", "config": {"model_type": "distilbert", "dim": 16, "n_layers": 1, "n_heads": 2,
                                                     "hidden_dim": 32}, "pooling": "pooler"}},
        '`pooling` must be one that the model has; got pooler. This model has none: take "mean" or "cls".',
    ),
    "a pooler that there is not, of a model with several ends of a text": (
        {"text": {"kind": "transformers", "config": {"model_type": "llama", "eos_token_id": [1, 2], **TINY},
                  "pooling": "pooler"}},
        '`pooling` must be one that the model has; got pooler. This model has none: take "mean" or "cls".',
    ),
    "pictures of another size": (
        {"image": library(**VIT["config"], image_size=64)},
        "`image_size` must be the 64 pixels of the image tower; got 32. Set data.image_size to it.",
    ),
    "pictures of other channels": (
        {"image": library(**VIT["config"], num_channels=1), "channels": 3},
        "`channels` must be the 1 of the image tower; got 3. Set data.channels to it, or to 1.",
    ),
    "too many tokens": (
        {"text": library(**BERT["config"], vocab_size=5)},
        "`tokenizer` must have no more tokens than the text tower; got 9 for a text tower of 5. "
        "Use the tokenizer that the model was made with.",
    ),
    "captions too long": (
        {"text": library(**BERT["config"], max_position_embeddings=4)},
        "`length` must be at most the 4 tokens of the text tower; got 6. Set model.tokenizer.length to it.",
    ),
    "captions too long behind a padding": (
        {"text": library(**{**BERT["config"], "model_type": "roberta", "max_position_embeddings": 6})},
        "`length` must be at most the 5 tokens of the text tower; got 6. Set model.tokenizer.length to it.",
    ),
    "one tower for both": (
        {"both": VIT},
        "`both` must be a model with vision_model and text_model; got ViTModel. "
        "Take a CLIP or a SigLIP, or give the two sides a tower each.",
    ),
    "a side without a pooler": (
        {"both": {**CLIP, "config": {**CLIP["config"], "model_type": "chinese_clip"}}},
        "`both` must be a model whose sides have poolers; got ChineseCLIPModel. "
        "Take a CLIP or a SigLIP, or give the two sides a tower each.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_models_are_refused(case, tokenizer):
    settings, sentence = REFUSED[case]
    assert refusal(built, tokenizer, **settings).startswith(sentence)
