"""One way in: a recipe file stands for a command line.

The file's keys become flags, the real flags follow (the later wins), and all is parsed once.
"""

import difflib
import sys
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, get_args, get_type_hints

import tyro
import yaml

from outrider.train.kinds import EagleRun, HydraRun, MedusaRun, MtpRun
from outrider.train.settings import Settings, field_names

S = TypeVar("S", bound=Settings)
ENTRIES: dict[type[Settings], str] = {
    EagleRun: "train/eagle.py",
    MedusaRun: "train/medusa.py",
    HydraRun: "train/hydra.py",
    MtpRun: "train/mtp.py",
}
"""The entry point of each kind's settings."""


def parse(argv: Sequence[str] | None, settings: type[S]) -> S:
    """Settings from flags and recipes; wrong input ends with a message and exit code 2."""
    given = expand(list(sys.argv[1:] if argv is None else argv), settings)
    flat = (tyro.conf.OmitArgPrefixes,)
    return tyro.cli(settings, args=given, prog=ENTRIES[settings], config=flat)


def kinds_of(settings: type[Settings]) -> tuple[str, ...]:
    """The kinds of head that these settings can train."""
    return get_args(get_type_hints(get_type_hints(settings)["head"])["head"])


def expand(argv: Sequence[str], settings: type[Settings]) -> list[str]:
    """The command line with every recipe's flags in front of the flags given by hand."""
    front: list[str] = []
    rest = list(argv)
    for index, word in enumerate(argv):
        if word == "--recipe" and index + 1 < len(argv):
            front += recipe_argv(find(argv[index + 1]), settings)
        elif word.startswith("--recipe="):
            front += recipe_argv(find(word.removeprefix("--recipe=")), settings)
    return front + rest


def find(name: str) -> Path:
    """The file of a recipe given by path, or by the bare name of a shipped one."""
    if Path(name).is_file():
        return Path(name)
    shipped = shipped_recipes()
    if name in shipped:
        return shipped[name]
    raise ValueError(
        f"recipe is {name!r}, which is no file; shipped recipes: {', '.join(sorted(shipped))}"
    )


def shipped_recipes() -> dict[str, Path]:
    """Recipes that come with the package, by name."""
    folder = Path(str(resources.files("outrider.train.configs")))
    return {path.stem: path for path in sorted(folder.glob("*.yaml")) if is_recipe(path)}


def is_recipe(path: Path) -> bool:
    """Accelerate's own files live in the same folder and are told apart by their first key."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    return isinstance(content, dict) and "compute_environment" not in content


def recipe_argv(path: Path, settings: type[Settings]) -> list[str]:
    """The flags that a recipe file stands for."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as problem:
        raise ValueError(f"recipe {path} is not valid YAML: {problem}") from problem
    if not isinstance(content, dict):
        raise ValueError(f"recipe {path} holds no `key: value` lines; write one flag a line")
    kind = content.get("head")
    rightful = [entry for run, entry in ENTRIES.items() if kind in kinds_of(run)]
    if rightful and kind not in kinds_of(settings):
        raise ValueError(f"recipe {path} is for head {kind!r}, which {rightful[0]} trains")
    known = field_names(settings)
    words: list[str] = []
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in known or name == "recipe":
            close = difflib.get_close_matches(name, known, n=3)
            hint = f"did you mean {', '.join(close)}?" if close else "see --help for all keys"
            raise ValueError(f"recipe {path} has the unknown key {key!r}; {hint}")
        words += flag(name, value, path)
    return words


def flag(name: str, value: object, path: Path) -> list[str]:
    """Words of one flag; YAML leaves 1e-4 a string, and so it is parsed like any typed flag."""
    dashed = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{dashed}" if value else f"--no-{dashed}"]
    if isinstance(value, dict):
        raise ValueError(f"recipe {path}: {name} holds nested keys; write one flat flag a line")
    if isinstance(value, list):
        return [f"--{dashed}", *(str(item) for item in value)]
    return [f"--{dashed}", str(value)]


def entry_of(argv: Sequence[str]) -> type[Settings]:
    """The settings that train the kind of head which --head or a recipe names; EAGLE's otherwise.

    Raises ValueError for a kind that none of them trains.
    """
    kinds = ["eagle3"]
    for index, word in enumerate(argv):
        name, equals, value = word.partition("=")
        value = value if equals else next(iter(argv[index + 1 :]), "")
        if name == "--head":
            kinds.append(value)
        elif name == "--recipe":
            content = yaml.safe_load(find(value).read_text(encoding="utf-8"))
            kinds.insert(1, str(dict(content or {}).get("head", kinds[0])))
    for entry in ENTRIES:
        if kinds[-1] in kinds_of(entry):
            return entry
    known = ", ".join(kind for entry in ENTRIES for kind in kinds_of(entry))
    raise ValueError(f"head is {kinds[-1]!r}; choose one of {known}")


def to_yaml(settings: Settings, changes: Mapping[str, Any] = MappingProxyType({})) -> str:
    """The settings, with changes by flag name, as a recipe that gives the same settings again."""
    flat = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in (settings.flat() | dict(changes)).items()
        if key not in ("recipe", "plan") and value not in (None, ())
    }
    return yaml.safe_dump(flat, sort_keys=False)
