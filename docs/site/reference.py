"""Pages of the reference that are written from the code: public names, the command, and the errors."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from torch import nn

import contrastile
import contrastile.losses
from contrastile.modules.base import Loss

ROOT = Path(__file__).parents[2]
ADAPTERS = "contrastile.integrations."
# page, its title, its first sentence, and its names with their modules
API: dict[str, tuple[str, str, dict[str, str]]] = {
    "losses": (
        "Which losses are there?",
        "Modules by name, and `contrast`, the function under them. [Which loss do I need?](../losses.md) helps "
        "to choose.",
        dict.fromkeys(
            [*(name for name in contrastile.__all__ if name.endswith(("Loss", "Queue"))), "contrast"], "contrastile"
        ),
    ),
    "pair_losses": (
        "Which values does `contrast` take as its loss?",
        "`contrast(q, k, loss=...)` takes one of these, and any subclass of `PairLoss`. `symmetric=True` is the mean "
        "of both directions, where the loss allows it. With `exclude_self=True` row i and key i are the same example, "
        "which is not compared with itself. Leave `uses_bias` and `pairwise` as they are.",
        dict.fromkeys(contrastile.losses.__all__, "contrastile.losses"),
    ),
    "encode": (
        "How is the gradient cache called?",
        "`encode` runs an encoder over a batch of any size, with the activations of one sub-batch in memory.",
        dict.fromkeys(("encode", "Ragged"), "contrastile"),
    ),
    "scorers": (
        "Which learned distances are there?",
        "A scorer takes the place of the dot product: `contrast(q, k, scorer=...)`.",
        dict.fromkeys(("Bilinear", "PairMLP", "MaxSim", "padded"), "contrastile.scorers"),
    ),
    "integrations": (
        "Which adapters for other libraries are there?",
        "[How do I come from another library?](../coming_from.md) shows them at work.",
        {
            **dict.fromkeys(("replace_losses", "ClipLoss", "SigLipLoss", "CoCaLoss"), f"{ADAPTERS}open_clip"),
            **dict.fromkeys(
                ("CachedRankingLoss", "CachedSymmetricLoss", "CachedGISTLoss", "CachedMultiVectorLoss"),
                f"{ADAPTERS}sentence_transformers",
            ),
            **dict.fromkeys(("ContrastileMixin", "TextPairs", "mean_pooled"), f"{ADAPTERS}transformers"),
        },
    ),
}
_shown = {name for *_, names in API.values() for name, module in names.items() if module == "contrastile"}
# every other public name
API["runs"] = (
    "Which functions work on runs and recipes?",
    "They need the extra `train`: `pip install '.[train]'` in a clone.",
    {name: "contrastile" for name in contrastile.__all__ if name not in _shown},
)
SECTION = re.compile(r"^(Arguments.*|How it is computed.*):$")
ENTRY = re.compile(r"^(\w[\w, ]*?): +(.*)$")


def api(page: str) -> str:
    """The page of some public names, from their signatures and docstrings."""
    title, sentence, names = API[page]
    parts = [f"# {title}\n\n{sentence}\n"]
    for name, module in names.items():
        value = getattr(importlib.import_module(module), name)
        parts.append(f"## `{name}`\n\n{_signature(name, module, value)}\n\n{docstring(inspect.getdoc(value) or '')}")
        if inspect.isclass(value) and issubclass(value, Loss):
            # its call has the arguments
            parts.append(docstring(inspect.getdoc(value.forward) or ""))
        parts.append(f"Source: [{_file(value)}](../../{_file(value)})\n")
    return "\n".join(parts)


def _file(value: Any) -> str:
    return Path(inspect.getsourcefile(inspect.unwrap(value)) or "").relative_to(ROOT).as_posix()


def _signature(name: str, module: str, value: Any) -> str:
    """The import, constructor and call of a name, with types."""
    own = inspect.signature(value)
    lines = [f"from {module} import {name}", ""]
    if inspect.isclass(value):
        lines.append(_call(name, list(own.parameters.values()), None))
        if any("forward" in vars(base) for base in value.__mro__ if base is not nn.Module):
            call = inspect.signature(value.forward)
            lines += ["", _call(f"{name}(...)", list(call.parameters.values())[1:], call.return_annotation)]
    else:
        lines.append(_call(name, list(own.parameters.values()), own.return_annotation))
    return "```py\n" + "\n".join(lines) + "\n```"


def _call(name: str, parameters: list[inspect.Parameter], returns: Any) -> str:
    """A call with its types, one parameter a line where it is long."""
    words, starred = [], False
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            starred = True
            words.append("*")
        if parameter.kind is not parameter.VAR_KEYWORD:
            default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
            several = parameter.kind is parameter.VAR_POSITIONAL
            starred = starred or several
            words.append(f"{'*' * several}{parameter.name}: {_type(parameter.annotation)}{default}")
    end = "" if returns is None else f" -> {_type(returns)}"
    line = f"{name}({', '.join(words)}){end}"
    return line if len(line) <= 90 else "\n".join([f"{name}(", *(f"    {word}," for word in words), f"){end}"])


def _type(annotation: Any) -> str:
    """An annotation as it stands in the source, with the words of a named choice spelled out."""
    from contrastile import _types

    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    choices = get_args(getattr(_types, text, None))
    return f"Literal[{', '.join(map(repr, choices))}]" if choices else text


def docstring(text: str) -> str:
    """A docstring of this project as Markdown: code blocks, examples, and a table for each list of arguments."""
    lines, out, k = text.splitlines(), [], 0
    while k < len(lines):
        line = lines[k]
        if SECTION.match(line):
            entries, k = _indented(lines, k + 1)
            out += ["", f"**{line.removesuffix(':')}**", "", *_table(entries), ""]
        elif line.startswith(">>> "):
            end = next((i for i in range(k, len(lines)) if not lines[i].strip()), len(lines))
            out += ["", "```pycon", *(re.sub(r" +# doctest:.*", "", line) for line in lines[k:end]), "```", ""]
            k = end
        elif line.startswith("    ") and (k == 0 or not lines[k - 1].strip()):
            code, k = _indented(lines, k)
            out += ["```py", *code, "```", ""]
        else:
            out.append(line)
            k += 1
    return "\n".join(out).replace("docs/scorers.md", "[learned distances](../scorers.md)") + "\n"


def _indented(lines: list[str], start: int) -> tuple[list[str], int]:
    """The indented block from a line on, without its indent, and the line behind it."""
    end = start
    while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
        end += 1
    return textwrap.dedent("\n".join(lines[start:end])).strip().splitlines(), end


def _table(entries: list[str]) -> Iterator[str]:
    yield from ("| name | meaning |", "|---|---|")
    rows: list[list[str]] = []
    for line in entries:
        if match := ENTRY.match(line):
            names = ", ".join(f"`{name.strip()}`" for name in match[1].split(","))
            rows.append([names, match[2]])
        elif rows:
            rows[-1][1] += " " + line.strip()
    for names, meaning in rows:
        yield f"| {names} | {meaning.replace('|', chr(92) + '|')} |"


def command() -> str:
    """The page of the command, from its parser."""
    from contrastile.cli.main import build_parser

    # the width of the usage lines
    os.environ["COLUMNS"] = "88"
    parser = build_parser()
    verbs = next(action for action in parser._actions if hasattr(action, "choices") and action.choices)
    about = {choice.dest: choice.help for choice in verbs._choices_actions}
    parts = ["# Which verbs and options does the command have?\n", f"{parser.description}\n"]
    parts += [
        "| verb | what it does |",
        "|---|---|",
        *(f"| [`{verb}`](#{verb}) | {about[verb]} |" for verb in about),
        "",
    ]
    parts += [f"\n`contrastile` itself takes these options, before the verb:\n\n{_arguments(parser)}\n"]
    for verb, each in verbs.choices.items():
        parts += _verb(verb, each, about.get(verb))
    return "\n".join(parts) + "\nExit codes are on the page of [failures](../trust.md#exit-codes).\n"


def _verb(name: str, parser: Any, about: str | None, level: int = 2) -> Iterator[str]:
    heading = name.split()[-1] if level == 2 else name
    usage = parser.format_usage().strip().removeprefix("usage: ").replace("\n" + " " * 7, "\n")
    yield f"{'#' * level} {heading}\n\n{_sentence(parser.description or about or '')}\n\n```text\n{usage}\n```\n"
    yield _arguments(parser)
    for action in parser._actions:
        if isinstance(action.choices, dict):
            helps = {choice.dest: choice.help for choice in action._choices_actions}
            for inner, each in action.choices.items():
                yield from _verb(f"{name} {inner}", each, helps.get(inner), level + 1)


def _sentence(text: str) -> str:
    text = " ".join(text.split())
    return f"{text[:1].upper()}{text[1:].removesuffix('.')}." if text else ""


def _arguments(parser: Any) -> str:
    rows = []
    for action in parser._actions:
        if action.dest in ("help", "verb") or isinstance(action.choices, dict):
            continue
        value = action.metavar or (action.dest.upper() if action.nargs != 0 and not action.choices else "")
        value = value if isinstance(value, str) else " ".join(value)
        names = ", ".join(f"`{f'{name} {value}'.strip()}`" for name in action.option_strings)
        names = names or f"`{action.metavar or action.dest}`"
        text = (action.help or "").replace("%(default)s", str(action.default)).replace("%%", "%")
        if action.choices:
            text += f" (one of {', '.join(f'`{choice}`' for choice in action.choices)})"
        rows.append(f"| {names} | {_cell(text)} |")
    return "\n".join(["| argument | meaning |", "|---|---|", *rows, ""]) if rows else ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def errors() -> str:
    """The index of errors: every sentence of the program's one form, by the part of the program that raises it."""
    found: dict[str, set[tuple[str, str, str, str]]] = defaultdict(set)
    for path in sorted((ROOT / "contrastile").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        words: dict[str, str] = {}
        for node in tree.body:
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    _assign(target, node.value, words)
        for scope in ast.walk(tree):
            if isinstance(scope, ast.FunctionDef):
                _collect(scope, path, dict(words), found)
    parts = [
        "# What does this error mean?\n",
        "Every error of contrastile has one form: *`name` must ...; got .... What to do.* The tables below list all of",
        "them, by the argument that they name. … stands for words that depend on the call.\n",
        "An error of the command ends with exit code 2. `contrastile --traceback VERB ...` shows where it came from.\n",
        "Your error is not here? [What went wrong?](../start/problems.md) begins with the symptom.\n",
    ]
    for part in sorted(found):
        parts += [f"## {part}\n", "| name | must | what to do | source |", "|---|---|---|---|"]
        for name, rule, remedy, source in sorted(found[part]):
            file = source.rsplit("/", 1)[1]
            parts.append(f"| `{name}` | {_cell(rule)} | {_cell(remedy)} | [{file}](../../{source}) |")
        parts.append("")
    return "\n".join(parts)


# calls that raise an error of the one form, by their number of arguments: words before the rule, and positions of name,
# rule and remedy
RAISED = {
    ("invalid", 4): ("", 0, 1, 3),
    ("number", 5): ("", 0, 3, 4),
    ("one_of", 4): ("be one of ", 0, 2, 3),
    ("whole_number", 4): ("be a whole number of at least ", 0, 2, 3),
}


def _collect(
    scope: ast.FunctionDef, path: Path, texts: dict[str, str], found: dict[str, set[tuple[str, str, str, str]]]
) -> None:
    """Add the errors that a function raises; its names stand for the texts that they have at that place."""
    source, drawer = path.relative_to(ROOT).as_posix(), path.relative_to(ROOT / "contrastile").parts[0]
    part = PARTS.get(drawer.removesuffix(".py"), drawer)
    for node, known in _expressions(scope.body, dict(texts)):
        if isinstance(node, ast.Call) and (_name(node.func), len(node.args)) in RAISED:
            before, *at = RAISED[_name(node.func), len(node.args)]
            name, rule, remedy = (_text(node.args[index], known) for index in at)
            own = [_text(word.value, known) for word in node.keywords if word.arg == "rule"]
            rule = own[0] if own else before + rule
            if rule.strip("…. ") and (name != "…" or not before):
                found[part].add((name, rule, remedy, source))
        elif isinstance(node, ast.Yield) and isinstance(node.value, ast.Tuple) and len(node.value.elts) == 3:
            # a rule of a recipe's section: condition, key, sentence
            _, key, sentence = (_text(each, known) for each in node.value.elts)
            if sentence.startswith("must "):
                found["Recipes"].add((key or "recipe", sentence.removeprefix("must "), "", source))


def _expressions(body: list[ast.stmt], texts: dict[str, str]) -> Iterator[tuple[ast.AST, dict[str, str]]]:
    """The expressions of statements in their order, with the texts that names have there.

    Texts of several branches are joined. Those of a branch that ends in a raise or a return are left behind.
    `texts` is changed, and emptied where the statements never end.
    """
    for statement in body:
        blocks = [block for _, block in ast.iter_fields(statement) if block and isinstance(block, list)]
        inner = [block for block in blocks if isinstance(block[0], ast.stmt)]
        inner += [
            part.body for block in blocks for part in block if isinstance(part, ast.ExceptHandler | ast.match_case)
        ]
        for part in ast.iter_child_nodes(statement):
            if not isinstance(part, ast.stmt | ast.ExceptHandler | ast.match_case):
                yield from ((node, texts) for node in ast.walk(part))
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            _assign(statement.targets[0], statement.value, texts)
        ways = [dict(texts) for _ in inner]
        for block, way in zip(inner, ways, strict=True):
            yield from _expressions(block, way)
        if not (isinstance(statement, ast.If) and statement.orelse) and not isinstance(statement, ast.With):
            ways.insert(0, dict(texts))
        if isinstance(statement, ast.Raise | ast.Return | ast.Continue | ast.Break):
            ways = []
        texts.clear()
        for way in ways:
            for name, text in way.items():
                texts[name] = " / ".join(dict.fromkeys([*texts.get(name, text).split(" / "), *text.split(" / ")]))


# the parts of the program, in a user's words
PARTS = {
    "engine": "Losses", "modules": "Losses", "functional": "Losses", "losses": "Losses", "tiles": "Losses",
    "exchange": "Losses", "_dispatch": "Losses", "_types": "Losses", "scorers": "Losses", "offload": "Losses",
    "_errors": "Losses", "_torch": "Losses", "gradcache": "The gradient cache", "distributed": "Ranks", "data": "Data",
    "models": "Models", "evaluate": "Evaluation", "train": "Training", "retrieval": "Search",
    "experiments": "Comparisons", "bench": "Benchmarks", "cli": "The command", "planner": "The planner",
    "integrations": "Adapters of other libraries",
}  # fmt: skip


def key_types() -> dict[str, str]:
    """The type and bounds of every key of a recipe, from the classes that check it."""
    from contrastile.train.config.base import known_keys
    from contrastile.train.recipe import KINDS

    types: dict[str, list[str]] = defaultdict(list)
    for kind in KINDS.values():
        for key, section in known_keys(kind):
            field = section.model_fields[key.rsplit(".", 1)[-1]]
            text = _kind(field.annotation, field.metadata)
            if text not in types[key]:
                types[key].append(text)
    return {key: " or ".join(texts) for key, texts in types.items()}


NAMES = {
    int: "whole number", float: "number", str: "text", bool: "true, false", tuple: "list", list: "list",
    dict: "table",
}  # fmt: skip


def _kind(annotation: Any, bounds: Sequence[Any] = ()) -> str:
    """A type in words: numbers with their limits, the words of a choice, lists and tables."""
    arguments = get_args(annotation)
    if hasattr(annotation, "__metadata__"):
        return _kind(arguments[0], annotation.__metadata__)
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{json.dumps(word)}`" for word in arguments)
    if get_origin(annotation) in (Union, UnionType):
        kinds = [_kind(each, bounds) for each in arguments if each is not type(None)]
        return " or ".join(dict.fromkeys(kinds))
    name = NAMES.get(get_origin(annotation) or annotation, "table")
    limits = [
        f"{sign} {_plain(getattr(each, limit))}"
        for item in bounds
        for each in (item, *getattr(item, "metadata", ()))
        for limit, sign in (("ge", "≥"), ("gt", "&gt;"), ("le", "≤"), ("lt", "&lt;"))
        if getattr(each, limit, None) is not None and getattr(each, limit) < 2**20
    ]
    return " ".join([name, *([", ".join(limits)] if limits and name.endswith("number") else [])])


def _plain(number: float) -> str:
    """A limit without the point of a whole float: 1,000,000."""
    return f"{int(number):,}" if number == int(number) else str(number)


def _assign(target: ast.expr, value: ast.expr, texts: dict[str, str]) -> None:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        for each, part in zip(target.elts, value.elts, strict=True):
            _assign(each, part, texts)
    elif isinstance(target, ast.Name):
        texts[target.id] = _text(value, texts)


def _name(function: ast.expr) -> str:
    return getattr(function, "id", getattr(function, "attr", ""))


def _text(node: ast.expr, texts: dict[str, str]) -> str:
    """The words of an argument, with … for what only a call knows."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.Name):
        return texts.get(node.id, "…")
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.IfExp):
        return f"{_text(node.body, texts)} / {_text(node.orelse, texts)}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left, texts) + _text(node.right, texts)
    if isinstance(node, ast.Tuple):
        return ", ".join(_text(each, texts) for each in node.elts)
    return "…"
