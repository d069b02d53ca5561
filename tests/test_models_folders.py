"""Folders of models and tokenizers with remote code, or with weights that are not their model's, are refused."""

import importlib
import json
import re
import shutil
import socket
from pathlib import Path

import pytest
import torch
from refusals import refusal
from safetensors.torch import load_file, save_file

from contrastile.models.remote_code import DOWNLOADING, SHIPPED, remote_code
from contrastile.models.text import load_tokenizer, train_tokenizer
from contrastile.models.towers import build_model, build_retriever
from contrastile.train.recipe import RecipeError, load_any_recipe

pytest.importorskip("transformers")

TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
CODE = "`folder` must ask for no code but that of torch and transformers; got "
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["LATIN SMALL LETTER A", "GREEK BETA"], length=6)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    from transformers import BertConfig, BertForMaskedLM, BertModel, CLIPConfig, CLIPModel, ViTConfig, ViTModel

    root = tmp_path_factory.mktemp("saved")
    text = {**TINY, "vocab_size": 40, "max_position_embeddings": 16}
    vision = {**TINY, "image_size": 32, "patch_size": 8}
    models = {
        "image": ViTModel(ViTConfig(**vision)),
        "text": BertModel(BertConfig(**text)),
        "both": CLIPModel(CLIPConfig(projection_dim=12, text_config=text, vision_config=vision)),
        "headed": BertForMaskedLM(BertConfig(**text)),
    }
    for name, model in models.items():
        model.save_pretrained(root / name)
    return root


@pytest.fixture
def copied(saved, tmp_path):
    def copy(name):
        return Path(shutil.copytree(saved / name, tmp_path / name))

    return copy


def built(side, folder, tokenizer, **more):
    tower = {"kind": "transformers", "folder": str(folder), **more}
    if side == "query":
        return build_retriever({"query": tower, "passage": tower}, tokenizer=tokenizer)
    return build_model({"image_size": 32, "channels": 3, side: tower}, tokenizer=tokenizer)


def refused(*arguments, **more):
    with pytest.raises(ValueError) as caught:
        built(*arguments, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edited(folder, name="config.json", **entries):
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))
    return folder


# --- code


@pytest.fixture
def reached(monkeypatch):
    """The calls of the network, of the hub's downloads, and of loaders of kernels and modules."""
    import huggingface_hub
    from transformers import dynamic_module_utils, modeling_utils
    from transformers.integrations import hub_kernels
    from transformers.utils import hub

    calls = []

    def recorded(name):
        def call(*_, **__):
            calls.append(name)
            raise OSError(f"{name} was called")

        return call

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, recorded(name))
    for name in ("getaddrinfo", "create_connection"):
        monkeypatch.setattr(socket, name, recorded(name))
    for name in ("hf_hub_download", "snapshot_download"):
        for module in (huggingface_hub, hub):
            monkeypatch.setattr(module, name, recorded(name), raising=False)
    for name in ("get_class_in_module", "get_cached_module_file"):
        monkeypatch.setattr(dynamic_module_utils, name, recorded(name))
    # as where the package for kernels is installed
    for module in (modeling_utils, hub_kernels):
        monkeypatch.setattr(module, "is_kernels_available", lambda *_: True)
    monkeypatch.setattr(hub_kernels, "get_kernel_hub", recorded("get_kernel"), raising=False)
    load = importlib.import_module

    def loaded(name, *package):
        if name.split(".")[0] in ("kernels", "transformers_modules"):
            calls.append(name)
        return load(name, *package)

    monkeypatch.setattr(importlib, "import_module", loaded)
    return calls


KERNEL = "org/kernel"
ASKING = {
    "attention": ("text", {"_attn_implementation": KERNEL}, f'_attn_implementation = "{KERNEL}"'),
    "attention by its public name": ("image", {"attn_implementation": KERNEL}, f'attn_implementation = "{KERNEL}"'),
    "attention of a package": (
        "text",
        {"attn_implementation": "flash_attention_2"},
        'attn_implementation = "flash_attention_2"',
    ),
    "attention of a part": (
        "both",
        {"vision_config": {**TINY, "image_size": 32, "patch_size": 8, "attn_implementation": KERNEL}},
        f'vision_config.attn_implementation = "{KERNEL}"',
    ),
    "attention by part": (
        "both",
        {"_attn_implementation": {"": "sdpa", "text_config": KERNEL}},
        "_attn_implementation",
    ),
    "experts": ("text", {"experts_implementation": "sonicmoe"}, 'experts_implementation = "sonicmoe"'),
    "modules": ("text", {"auto_map": {"AutoModel": "org/model--modeling.Model"}}, "auto_map"),
    "trust": ("query", {"trust_remote_code": True}, "trust_remote_code"),
    "a pipeline": ("image", {"custom_pipelines": {"x": {"impl": "pipe.Pipe"}}}, "custom_pipelines"),
    "a quantiser": ("query", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config"),
    "a backbone": ("image", {"model_type": "dpt", "backbone": "org/model"}, 'backbone = "org/model"'),
    "a model of timm": (
        "image",
        {"model_type": "timm_wrapper", "architecture": "hf-hub:a/b"},
        'architecture = "hf-hub:a/b"',
    ),
    "a model that fetches": ("text", {"model_type": "yoso"}, 'model_type = "yoso"'),
}


@pytest.mark.parametrize("case", ASKING)
def test_a_folder_with_remote_code_is_refused_without_network_access(case, copied, tokenizer, reached):
    side, entries, got = ASKING[case]
    folder = edited(copied("text" if side == "query" else side), **entries)
    assert refused(side, folder, tokenizer) == (
        f'{CODE}{got} in "{folder}/config.json". Save the model or the tokenizer without it.'
    )
    assert reached == []


@pytest.mark.parametrize("name", ["eager", "sdpa", {"": "eager", "text_config": "sdpa"}, None])
def test_implementations_of_torch_and_transformers_are_allowed(name, copied, tokenizer, reached):
    model = built("both", edited(copied("both"), attn_implementation=name, quantization_config=None), tokenizer)
    asked = name["text_config"] if isinstance(name, dict) else name
    assert model.text.tower.model.config._attn_implementation == (asked or "sdpa")
    assert reached == []


def test_a_configuration_with_remote_code_is_refused(tokenizer, reached):
    config = {"model_type": "bert", **TINY, "attn_implementation": KERNEL}
    assert refusal(build_model, {"text": {"kind": "transformers", "config": config}}, tokenizer=tokenizer) == (
        "`config` must ask for no code but that of torch and transformers; "
        f'got attn_implementation = "{KERNEL}". Leave it out.'
    )
    assert reached == []


@pytest.mark.parametrize("kind", ["config", "folder"])
def test_a_recipe_with_remote_code_is_refused_in_one_line(tmp_path, monkeypatch, kind):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit", "auto_map": {"AutoModel": "a.B"}}))
    given = f"'{tmp_path}'" if kind == "folder" else "{model_type = 'vit', auto_map = {AutoModel = 'a.B'}}"
    recipe = f"[train]\nexamples = 9\n[model]\nimage = {{kind = 'transformers', {kind} = {given}}}\n"
    (tmp_path / "x.toml").write_text(recipe)
    with pytest.raises(RecipeError) as caught:
        load_any_recipe(tmp_path / "x.toml")
    line = f"x.toml: model.image.{kind}: must ask for no code but that of torch and transformers; got auto_map"
    assert line in str(caught.value)


@pytest.mark.parametrize(
    "entries",
    [
        {"model_type": "bert", "auto_map": {}, "quantization_config": None, "trust_remote_code": False},
        {"model_type": "timm_backbone", "backbone": "resnet18"},
        {"layers": [{"attn_implementation": "sdpa"}], "experts_implementation": {"": "grouped_mm"}},
    ],
)
def test_entries_without_remote_code_are_allowed(entries):
    assert remote_code(entries) is None


def test_remote_code_inside_lists_is_detected():
    assert remote_code({"per_layer_config": [{}, {"auto_map": {"a": "b"}}]}) == "per_layer_config.auto_map"


def test_the_allowed_implementations_are_those_of_the_library():
    import transformers
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    assert {*SHIPPED["attn_implementation"]} <= {"eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()}
    assert {*SHIPPED["experts_implementation"]} <= {"eager", *ALL_EXPERTS_FUNCTIONS.valid_keys()}
    models = Path(transformers.__file__).parent / "models"
    asking = {
        path.parent.name for path in models.glob("*/modeling_*.py") if re.search(r"\bget_kernel\(", path.read_text())
    }
    assert asking == {*DOWNLOADING}


@pytest.fixture
def tokenizer_folder(tokenizer, tmp_path):
    from transformers import PreTrainedTokenizerFast

    tokenizer.save(tmp_path)
    engine = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), pad_token="[PAD]")
    engine.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        (
            {"auto_map": {"AutoTokenizer": ["org/tokens--tokens.Tokens", None]}},
            f'{CODE}auto_map in "{{}}/tokenizer_config.json". Save the model or the tokenizer without it.',
        ),
        (
            {"tokenizer_class": "OtherTokenizer"},
            '`tokenizer_class` must be a class of transformers; got "OtherTokenizer" in "{}". '
            "Save the tokenizer with one of its classes.",
        ),
    ],
)
def test_a_tokenizer_with_remote_code_is_refused(tokenizer_folder, reached, entries, sentence):
    load_tokenizer(tokenizer_folder, length=6)
    folder = edited(tokenizer_folder, "tokenizer_config.json", **entries)
    assert refusal(load_tokenizer, folder, length=6) == sentence.format(tokenizer_folder)
    assert reached == []


# --- weights


def rewritten(folder, change):
    state = load_file(folder / WEIGHTS)
    save_file(change(state), folder / WEIGHTS, metadata={"format": "pt"})


def without_trunk(state):
    return {name: weight for name, weight in state.items() if ".layer" not in name}


def reshaped(state):
    name = max(name for name in state if "layer_norm" in name or "layernorm" in name or "LayerNorm" in name)
    return {**state, name: torch.ones(5)}


def sharded(folder, index=None):
    state = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(state)
    shards = {
        name: f"model-0000{1 + (place > len(names) // 2)}-of-00002.safetensors" for place, name in enumerate(names)
    }
    for shard in set(shards.values()):
        part = {name: state[name] for name in names if shards[name] == shard}
        save_file(part, folder / shard, metadata={"format": "pt"})
    described = {"metadata": {"total_size": 1}, "weight_map": shards}
    (folder / INDEX).write_text(json.dumps(described) if index is None else index)
    return sorted(set(shards.values()))


SIDES = ["image", "text", "both", "query"]
LACKING = '`folder` must hold the weights of its model; got "{}": it lacks '


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("change", [without_trunk, lambda state: {}], ids=["without its trunk", "empty"])
def test_missing_weights_are_named(side, change, copied, tokenizer, capfd):
    folder = copied("text" if side == "query" else side)
    state = load_file(folder / WEIGHTS)
    lacking = [name for name in state.keys() - change(state).keys() if not name.startswith("pooler.")]
    rewritten(folder, change)
    said = refused(side, folder, tokenizer)
    # by the names that they have in the model, which a file may have from before
    remedy = "Save the whole model there; it may lack a pooler where another pooling is taken."
    names = said.removeprefix(LACKING.format(folder)).removesuffix(f" and {len(lacking) - 3} more. {remedy}")
    assert re.fullmatch(r"[\w.]+(, [\w.]+){2}", names)
    assert re.search(r"embeddings|layers?\.0\.", said)
    # nor is there a table of the library's
    assert "MISSING" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("side", SIDES)
def test_weights_of_another_shape_are_named(side, copied, tokenizer):
    folder = copied("text" if side == "query" else side)
    rewritten(folder, reshaped)
    said = refused(side, folder, tokenizer)
    start = '`folder` must hold the weights of its model; got "{}": it has of another shape '
    assert said.startswith(start.format(folder))
    assert re.search(r"(?i)layer_?norm", said)


def test_an_unused_pooler_may_be_missing(saved, tokenizer, caplog):
    folder = saved / "headed"
    built("text", folder, tokenizer)
    assert caplog.messages == [
        f'the weights in "{folder}" fit but for what is not used: it lacks pooler.dense.bias, pooler.dense.weight; it '
        "has besides cls.predictions.bias, cls.predictions.transform.LayerNorm.bias, "
        "cls.predictions.transform.LayerNorm.weight and 2 more"
    ]
    said = refused("text", folder, tokenizer, pooling="pooler")
    assert said.startswith(f"{LACKING.format(folder)}pooler.dense.bias, pooler.dense.weight. ")


DAMAGED = {
    "a bad header": lambda path: path.write_bytes(b"\xff" * 64),
    "no bytes": lambda path: path.write_bytes(b""),
    "half a file": lambda path: path.write_bytes(path.read_bytes()[:-64]),
}


# each damage, and each side that reads a file
@pytest.mark.parametrize(
    ("side", "damage"),
    [("text", "a bad header"), ("text", "no bytes"), *((side, "half a file") for side in SIDES)],
)
def test_damaged_weights_are_reported_in_one_line(side, damage, copied, tokenizer):
    folder = copied("text" if side == "query" else side)
    DAMAGED[damage](folder / WEIGHTS)
    said = refused(side, folder, tokenizer)
    assert said.startswith(
        f'`folder` must hold a model that transformers can load; got "{folder}" (SafetensorError: Error while '
    )
    assert said.endswith("). Save the model there again with save_pretrained.")


class Planted:
    """Makes a folder where it is unpickled."""

    def __reduce__(self):
        import os

        return os.mkdir, ("planted",)


@pytest.mark.parametrize("name", ["pytorch_model.bin", None])
def test_pickled_weights_are_refused(name, copied, tokenizer, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    folder = copied("text")
    (folder / WEIGHTS).unlink()
    if name:
        torch.save(Planted(), folder / name)
    assert refused("text", folder, tokenizer) == (
        f'`folder` must hold the model\'s weights as safetensors; got {name or "none"} in "{folder}". '
        "Save the whole model there with save_pretrained."
    )
    assert not (tmp_path / "planted").exists()


@pytest.mark.parametrize("side", SIDES)
def test_sharded_weights_equal_those_of_one_file(side, copied, tokenizer):
    folder = copied("text" if side == "query" else side)
    torch.manual_seed(1)
    whole = built(side, folder, tokenizer).state_dict()
    sharded(folder)
    torch.manual_seed(1)
    parts = built(side, folder, tokenizer).state_dict()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_missing_shards_and_other_formats_are_named(copied, tokenizer):
    folder = copied("text")
    _, second = sharded(folder)
    (folder / second).rename(folder / "x.safetensors")
    sentence = f'`folder` must hold the safetensors that {INDEX} names; got {{}} in "{folder}". '
    assert refused("text", folder, tokenizer).startswith(sentence.format(second))
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {"a": "pytorch_model.bin"}}))
    assert refused("text", folder, tokenizer).startswith(sentence.format("pytorch_model.bin"))
    (folder / INDEX).write_text("{}")
    assert refused("text", folder, tokenizer).startswith(sentence.format("no weight_map"))


def test_missing_weights_of_a_shard_are_named(copied, tokenizer):
    folder = copied("text")
    first, _ = sharded(folder)
    state = load_file(folder / first)
    gone = sorted(state)[-1]
    save_file({name: state[name] for name in state if name != gone}, folder / first, metadata={"format": "pt"})
    assert refused("text", folder, tokenizer).startswith(f"{LACKING.format(folder)}{gone}. ")


@pytest.mark.parametrize("name", ["config.json", INDEX, "preprocessor_config.json"])
@pytest.mark.parametrize(("content", "rule"), [("[", "that can be read"), ("[]", "with a table")])
def test_damaged_json_files_are_reported_in_one_line(copied, tokenizer, name, content, rule):
    folder = copied("image")
    if name == INDEX:
        sharded(folder)
    (folder / name).write_text(content)
    assert refused("image", folder, tokenizer).startswith(f'`folder` must hold a {name} {rule}; got "{folder}/{name}"')


def test_an_adapter_without_its_model_is_refused(copied, tokenizer, reached):
    folder = copied("text")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "a/b"}))
    assert refused("text", folder, tokenizer) == (
        f'`folder` must hold a model without an adapter; got "{folder}/adapter_config.json". '
        "Save the whole model there with save_pretrained."
    )
    assert reached == []


def test_out_of_memory_is_not_reported_as_a_damaged_folder(saved, tokenizer, monkeypatch):
    import transformers

    def full(*_, **__):
        raise MemoryError

    monkeypatch.setattr(transformers.AutoModel, "from_pretrained", full)
    with pytest.raises(MemoryError):
        built("text", saved / "text", tokenizer)
