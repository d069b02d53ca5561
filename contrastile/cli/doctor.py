"""`contrastile doctor [RECIPE]`: the machine, the choices of "auto" there with reasons, and the plan of a recipe."""

import argparse
import json
from collections.abc import Iterator
from typing import Any

from contrastile._errors import extra, invalid
from contrastile.cli import plan
from contrastile.cli.options import OVERRIDES, RECIPE, at_least, number
from contrastile.train.log import quantity, size

SUMMARY = 'devices and versions of this machine, and the choices of "auto" with their reasons'
EXAMPLE = "contrastile doctor glyphs"


def add_to(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("recipe", nargs="?", help=f"{RECIPE}; adds its plan on this machine")
    add("overrides", **OVERRIDES, help="as for train")
    add("--ranks", type=int, default=1, metavar="N", help="number of ranks, which are processes (default: 1)")
    add("--batch", metavar="B", help="pairs of all ranks, without a recipe, such as 64k (default: 32k)")
    add("--features", type=int, metavar="D", help="features, without a recipe (default: 512)")
    add("--json", action="store_true", help="the same as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the examination; return 1 where a device is broken."""
    for name in ("ranks", "features"):
        at_least(name, getattr(arguments, name))
    batch = None if arguments.batch is None else number("--batch", arguments.batch, plan.PAIRS)
    sizes = {name: n for name, n in (("batch", batch), ("features", arguments.features)) if n is not None}
    recipe = None
    if arguments.recipe is not None:
        for name, got in sizes.items():
            raise invalid(f"--{name}", "be left out with a recipe", got, "Change its keys, such as train.batch=4096.")
        from contrastile.train.recipe import load_any_recipe

        recipe = load_any_recipe(arguments.recipe, arguments.overrides)

    from contrastile.cli.machine import broken, examine

    planned, of_loss = None, dict[str, Any](sizes)
    if recipe is not None:
        from contrastile.train.planned import planned as plan_of

        planned = plan_of(recipe, ranks=arguments.ranks)
        loss = planned.step.loss
        of_loss = {"batch": (loss.columns or loss.rows) * loss.ranks, "features": loss.carried, "dtype": loss.dtype}
        of_loss |= {"host": loss.host, "rows": loss.rows * loss.ranks}
    values = examine(ranks=arguments.ranks, **of_loss)
    if arguments.json:
        print(json.dumps(values | {"recipe": planned and planned.values()}, indent=1))
    else:
        print("\n".join([*lines(values), *(["", *plan.lines(planned)] if planned else ())]))
    return 1 if broken(values) else 0


def lines(values: dict[str, Any]) -> Iterator[str]:
    system, torch = values["system"], values["torch"]
    yield f"contrastile {system['contrastile']}, Python {system['python']}, {system['system']}"
    nccl = f", NCCL {torch['nccl']}" if torch["nccl"] else ", no NCCL"
    yield f"torch {torch['version']}, CUDA {torch['cuda'] or 'none'}{nccl}, {quantity(torch['threads'], 'threads')}"
    yield f"{system['cpus']:g} CPUs, {size(system['free'])} of {size(system['memory'])} memory free"
    for device in values["devices"]:
        if device["broken"] is not None:
            yield f"{device['name']}: BROKEN: {device['broken']}"
        elif "model" in device:
            memory = f"{size(device['free'])} of {size(device['memory'])} free"
            yield f"{device['name']}: {device['model']}, compute capability {device['capability']}, {memory}"
    for group, packages in values["packages"].items():
        installed = ", ".join(f"{name} {version}" for name, version in packages.items() if version)
        missing = ", ".join(name for name, version in packages.items() if not version)
        remedy = "" if group == "beside" else f": pip install {extra(group)}"
        yield f"[{group}] {installed or 'nothing'}" + (f"; not installed: {missing}{remedy}" if missing else "")
    for auto in values["auto"]:
        yield f'\n"auto" on {auto["device"]}:'
        cases: dict[str, list[str]] = {}
        for case in auto["backends"]:
            declined = "".join(f"; {name} declined: {reason}" for name, reason in case["declined"].items())
            cases.setdefault(case["takes"] + declined, []).append(f"{case['loss']} {case['dtype']}")
        yield from (f"  backend {choice} (for {', '.join(names)})" for choice, names in cases.items())
        if not auto["device"].startswith("cuda"):
            yield "  others: triton, on NVIDIA devices; dense, which holds the matrix, if it is named"
        yield f"  exchange {_exchange(auto['exchange'])}"
        yield f"  workspace {size(auto['workspace'])}: 1/64 of the memory; on one GPU 1/32, up to 2.25 GiB, if more"
        yield f"  retain, sub_batch: {size(auto['room'])} to share among graphs"


def _exchange(exchange: dict[str, Any]) -> str:
    if exchange["ranks"] > 1 and "gathered" not in exchange:
        return f"{exchange['takes']} between {exchange['ranks']} ranks: the features wait in host memory"
    if "gathered" not in exchange:
        return exchange["takes"] + ": one process; --ranks N asks for more"
    rows = f"{quantity(exchange['batch'], 'rows')} of {exchange['features']} in {exchange['dtype']}"
    needs = f"gathering {rows} takes {size(exchange['gathered'])} a rank"
    carried = ", by copy engines" if exchange["copied"] else ""
    if exchange["copied"] and exchange["takes"] == "ring":
        carried += ", in the time of a gather and with less memory"
    ranks = f"{exchange['ranks']} ranks{carried}"
    return f"{exchange['takes']} between {ranks}: {needs}, allowed is {size(exchange['allowed'])}"
