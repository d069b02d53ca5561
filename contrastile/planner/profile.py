"""Profiles: the rates of a device, by which a plan's arithmetic becomes seconds; and the word for the target's GPUs.

The package has profiles of the H200 and of the H100 (`profiles/`, each with its provenance); `calibrate.py` makes one
of this machine.
"""

from __future__ import annotations

import os
import re
import tomllib
from dataclasses import dataclass, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from contrastile._errors import invalid

if TYPE_CHECKING:
    import torch

# nodes, GPUs of a node, chip, memory
COUNT = r"[1-9]\d*"
GPUS = re.compile(
    rf"(?:(?P<nodes>{COUNT})x)??(?:(?P<count>{COUNT})x)?(?P<chip>[A-Za-z]\w*)(?:-(?P<memory>{COUNT})GB)?", re.IGNORECASE
)
# a number of GPUs behind the chip, where none is read; GeForce cards, such as the rtx4090, have an x in their names
COUNT_BEHIND_CHIP = re.compile(rf"(?P<chip>[A-Za-z]\w*?)x(?P<count>{COUNT})", re.IGNORECASE)
# words for a device that name no chip
DEVICES = ("auto", "cpu", "cuda", "gpu")
# NVIDIA's chips below compute capability 8.0, which have neither instructions for bf16 nor fused kernels; and AMD's,
# which lack the kernels
OLDER = re.compile(r"([kmpt]\d|v100|gtx|rtx20\d\d|rtx8000|titan)\w*")
AMD = re.compile(r"mi\d\w*")
EXAMPLE = "Such as H200, 8xH100-80GB, or 32x8xH100-80GB for 32 nodes."
# bytes of a gigabyte on the label of a GPU: torch's total of an H100 with 80 GB is 79.2 GiB
LABELLED = 0.99 * 2**30
# the CPUs of this machine: the name of their profile, and torch's type of device
CPU = "cpu"
# ranks of a plan, which lists the rows of each
MOST_RANKS = 2**16


@dataclass(frozen=True)
class Profile:
    """Rates of a device.

    memory: bytes. products, attention: operations per second of 16-bit matrix products in towers, and inside attention.
    float32: the rate of products in float32, as a share. bandwidth: bytes per second of all other kernels. launch:
    seconds of the host per kernel. loss: operations per second of a large tiled loss; pair, dense_pair: seconds per
    pair beside them, of tiles and of each matrix of a dense block; block: per block within the workspace; call: per
    call. link, network: bytes per second to a GPU of the same node, and of another one. hop: seconds of a hop of the
    ring and pass. decode: images per second and CPU; cpus: CPUs for each GPU.
    """

    name: str
    device: str
    memory: int
    products: float
    attention: float
    float32: float
    bandwidth: float
    launch: float
    loss: float
    pair: float
    dense_pair: float
    block: float
    call: float
    link: float
    network: float
    hop: float
    decode: float
    cpus: float
    provenance: tuple[str, ...] = ()

    @classmethod
    def of(cls, values: dict[str, Any], source: str) -> Self:
        """The profile of a TOML table; raises ValueError where a rate is missing or not above 0."""
        known = {field.name for field in fields(cls)}
        rates = known - {"name", "device", "provenance"}
        wrong = sorted((values.keys() ^ known) - {"provenance"})
        wrong += [name for name in sorted(rates & values.keys()) if not _positive(values[name])]
        if wrong:
            rule = "have every rate of a profile, each above 0, and no other key"
            raise invalid("profile", rule, f"{wrong[0]} in {source}", "Make it anew: contrastile plan --calibrate.")
        return cls(**{**values, "provenance": tuple(values.get("provenance", ()))})


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


@dataclass(frozen=True)
class Target:
    """The machines of a plan: a profile, or None where the chip has none; ranks in all, and on one node.

    memory: bytes of a rank's device. The ranks of a node share that of a CPU, which is the node's own.
    """

    word: str
    profile: Profile | None
    memory: int
    ranks: int = 1
    per_node: int = 1
    # type of the device
    device: str = "cuda"
    # bytes of a node's host memory, known of this machine alone
    host: int | None = None
    # copy engines carry what the GPUs of a node send each other
    copies: bool = True
    # a GPU has instructions for bf16, and the fused kernels
    bf16: bool = True
    kernels: bool = True

    def __post_init__(self) -> None:
        if self.ranks > MOST_RANKS:
            raise invalid("ranks", f"be at most {MOST_RANKS:,}", f"{self.ranks:,}", "Plan for fewer GPUs.")


def known_profiles() -> dict[str, Profile]:
    """The profiles of the package and that of this machine, by their names in lower case."""
    shipped = [path for path in (files("contrastile.planner") / "profiles").iterdir() if path.name.endswith(".toml")]
    profiles = {}
    for path in (*shipped, calibrated_path()):
        if path.is_file():
            profile = Profile.of(tomllib.loads(path.read_text(encoding="utf-8-sig")), str(path))
            profiles[profile.name.lower()] = profile
    return profiles


def calibrated_path() -> Path:
    """The file with the profile of this machine."""
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "contrastile" / "profile.toml"


def target(word: str) -> Target:
    """The machines of a word such as "8xH100-80GB".

    A chip without a profile needs its memory, and gets no times. Gigabytes are those on the label: 80 GB of an H100
    are 80 · 2³⁰ bytes but a hundredth, which the driver keeps.

    >>> target("32x8xH100-80GB").ranks
    256
    """
    profiles = known_profiles()
    match = GPUS.fullmatch(word) if isinstance(word, str) else None
    if match is None:
        raise invalid("gpus", "be [nodes x] [GPUs x] chip [- memory in GB]", repr(word), EXAMPLE)
    chip, gigabytes = match["chip"].lower(), match["memory"]
    profile = _profile_of(chip, profiles)
    if profile is None:
        _refuse_count_behind_chip(word, match, profiles)
    if profile is None and gigabytes is None:
        names = ", ".join(sorted(profile.name for profile in profiles.values()))
        rule = f"name a chip with a profile ({names}), or its memory too"
        # names of chips have digits
        chips = "Add its gigabytes, as 8xA100-80GB does." if re.search(r"\d", chip) else EXAMPLE
        remedy = "Leave it out for this machine." if chip in DEVICES else chips
        raise invalid("gpus", rule, repr(word), remedy)
    memory = profile.memory if profile is not None else 0
    if gigabytes is not None:
        # the profile's own label keeps the profile's number
        labelled = int(int(gigabytes) * LABELLED)
        memory = min(memory, labelled) if memory and labelled < 1.1 * memory else labelled
    per_node, nodes = int(match["count"] or 1), int(match["nodes"] or 1)
    if profile is not None:
        profile = replace(profile, memory=memory)
    device = CPU if chip == CPU else "cuda" if profile is None else profile.device
    host = memory if device == CPU else None
    bf16 = OLDER.fullmatch(chip) is None
    kernels = bf16 and AMD.fullmatch(chip) is None
    return Target(word, profile, memory, nodes * per_node, per_node, device, host, bf16=bf16, kernels=kernels)


def _profile_of(chip: str, profiles: dict[str, Profile]) -> Profile | None:
    """The profile of a chip in lower case; that of this machine has its GPU's whole name: NVIDIA A100-SXM4-80GB."""
    return profiles.get(chip) or next((p for name, p in profiles.items() if chip in re.split("[ -]", name)), None)


def _refuse_count_behind_chip(word: str, match: re.Match[str], profiles: dict[str, Profile]) -> None:
    """Raise ValueError for a chip such as H100x8, whose name holds the number of GPUs."""
    behind = COUNT_BEHIND_CHIP.fullmatch(match["chip"])
    # the x of a card's name stands behind a letter, and before the three digits or more of its model
    if behind is not None and (behind["chip"][-1].isdigit() or len(behind["count"]) < 3):
        before, _, memory = word.partition(match["chip"])
        profile = _profile_of(behind["chip"].lower(), profiles)
        label = 80 if profile is None else round(profile.memory / LABELLED)
        right = f"{before}{behind['count']}x{behind['chip']}{memory or f'-{label}GB'}"
        raise invalid("gpus", "have the number of GPUs before the chip", repr(word), f"Such as {right}.")


def has_kernels(device: torch.device) -> bool:
    """True where the fused kernels run on a GPU of this machine."""
    import torch

    try:
        from contrastile.tiles.triton.plan import refusal
    except ImportError:
        return False
    return refusal(torch.bfloat16, device) is None


def this_machine(device: torch.device | None = None, ranks: int = 1) -> Target:
    """This machine with so many ranks, each on a GPU of its own, or all on the CPUs.

    device: where a rank computes; by default the GPU if there is one. Raises ValueError for more ranks than GPUs.
    """
    # for this machine alone: a word that names no other one is refused before torch is loaded
    import torch

    from contrastile.distributed.neighbours import reach_each_other
    from contrastile.offload import free_memory

    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else CPU)
    profiles, host = known_profiles(), free_memory(None)[1]
    if device.type != CPU:
        if ranks > (gpus := torch.cuda.device_count()):
            remedy = "Plan other machines by their names: contrastile plan RECIPE --gpus 8xH100-80GB."
            raise invalid("--ranks", f"be at most {gpus}, the GPUs that torch sees", ranks, remedy)
        name, memory = torch.cuda.get_device_name(device), free_memory(device)[1]
        profile = profiles.get(name.lower()) or next((p for p in profiles.values() if p.name in name), None)
        profile = None if profile is None else replace(profile, memory=memory)
        copies = reach_each_other(torch.device("cuda", 0), range(ranks))
        kernels = has_kernels(device)
        return Target(name, profile, memory, ranks, ranks, host=host, copies=copies, kernels=kernels)
    # without a profile there are no times
    return Target(CPU, profiles.get(CPU), host, ranks, ranks, CPU, host)
