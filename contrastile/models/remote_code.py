"""Refusal of configurations that load code, or a model, from elsewhere than this machine.

The argument `trust_remote_code=False` stops modules of Python alone: transformers fetches kernels for attention and
experts from its hub, looks up backbones there, and leaves quantised weights to further packages.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from contrastile._errors import invalid

RULE = "ask for no code but that of torch and transformers"
# entries that name modules, kernels, or a quantiser with kernels of its own
CODE = {
    "auto_map", "compression_config", "custom_generate", "custom_pipelines", "kernel_config", "quantization_config",
    "trust_remote_code", "use_kernels",
}  # fmt: skip
# implementations that torch and transformers ship, by the entry that selects one
SHIPPED = {
    "attn_implementation": ("eager", "sdpa", "flex_attention"),
    "experts_implementation": ("eager", "batched_mm", "grouped_mm"),
}
# models of transformers that download a kernel on a GPU by default
DOWNLOADING = ("mra", "rwkv", "sam3_video", "yoso")
# entries with a model's name in timm, and the model type for which transformers does not look it up on the hub
TIMM_NAMES, OF_TIMM = ("architecture", "backbone"), "timm_backbone"
# files of a folder from which transformers reads its classes
FILES = ("config.json", "tokenizer_config.json")
# file of a folder of open_clip, with the model's shapes and the normalisation of pixels
OPEN_CLIP = "open_clip_config.json"


def remote_code(entries: object) -> str | None:
    """The first entry, at any depth, that asks for code or a model that is not local; None where there is none.

    >>> remote_code({"model_type": "clip", "text_config": {"_attn_implementation": "org/kernel"}})
    'text_config._attn_implementation = "org/kernel"'
    """
    if isinstance(entries, list):
        return next(filter(None, map(remote_code, entries)), None)
    if not isinstance(entries, Mapping):
        return None
    for key, value in entries.items():
        if _is_remote(str(key), value, entries):
            return f'{key} = "{value}"' if isinstance(value, str) else str(key)
        if (inside := remote_code(value)) is not None:
            return f"{key}.{inside}"
    return None


def _is_remote(key: str, value: Any, entries: Mapping[Any, Any]) -> bool:
    shipped = SHIPPED.get(key.strip("_").removesuffix("_internal"))
    if shipped is not None:
        return any(name not in (None, *shipped) for name in _leaves(value))
    if key in TIMM_NAMES and isinstance(value, str):
        looked_up = key == "backbone" and entries.get("model_type") != OF_TIMM
        return looked_up or ":" in value or "/" in value
    return (key in CODE and bool(value)) or (key == "model_type" and value in DOWNLOADING)


def _leaves(value: Any) -> list[Any]:
    """The values of nested tables; an implementation may be given for each part of a model."""
    return [leaf for nested in value.values() for leaf in _leaves(nested)] if isinstance(value, Mapping) else [value]


def refuse_remote_code(folder: str | Path) -> dict[str, Any]:
    """The entries of a folder's `FILES`, the later files first; raises ValueError for remote code."""
    read: dict[str, Any] = {}
    for path in filter(Path.is_file, (Path(folder) / name for name in FILES)):
        entries = read_table(path)
        if (entry := remote_code(entries)) is not None:
            raise invalid("folder", RULE, f'{entry} in "{path}"', "Save the model or the tokenizer without it.")
        read.update(entries)
    return read


def read_table(path: Path) -> dict[str, Any]:
    """The table in a JSON file; raises ValueError for a file of anything else."""
    remedy = "Restore or replace it."
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as failure:
        raise invalid("folder", f"hold a {path.name} that can be read", f'"{path}" ({failure})', remedy) from failure
    if not isinstance(read, dict):
        raise invalid("folder", f"hold a {path.name} with a table", f'"{path}"', remedy)
    return read


def read_open_clip(folder: str | Path) -> dict[str, Any]:
    described = read_table(Path(folder) / OPEN_CLIP)
    if not isinstance(described.get("model_cfg"), dict):
        raise invalid("folder", f"hold a {OPEN_CLIP} with a model_cfg", f'"{folder}"', "Save the model there again.")
    return described
