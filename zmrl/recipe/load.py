"""Read a recipe file and `key=value` overrides. Everything that is wrong with them is a RecipeError of one line."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from zmrl.recipe.checks import check_values
from zmrl.recipe.schema import Recipe, RecipeError

_KEY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read the recipe file at `path`, apply `key=value` overrides, check every value.

    Raises RecipeError for an unreadable file, an unknown key, a wrong type or a value that cannot be trained with.
    Looks at no other file: see `check_output_dir` and `zmrl.train`.
    """
    changes = _parse(overrides)
    try:
        content = OmegaConf.load(path)
        if not isinstance(content, DictConfig):
            raise RecipeError(f"recipe {path}: expected keys and values at the top level; see recipes/aime_lora.yaml")
        content = OmegaConf.merge(content, changes)
        _require_sections(content)
        val = OmegaConf.select(content, "data.val")
        if isinstance(val, str):  # one data set may be written without brackets
            OmegaConf.update(content, "data.val", [val])
        merged = OmegaConf.merge(OmegaConf.structured(Recipe), content)
        recipe = OmegaConf.to_object(merged)
    except OSError as error:
        raise RecipeError(f"recipe {path}: {error.strerror or error}; give the path of a recipe file") from None
    except YAMLError as error:
        raise RecipeError(f"recipe {path} is not YAML: {' '.join(str(error).split())}; correct the file") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"recipe {path} is not a text file ({error}); give the path of a recipe file") from None
    except OmegaConfBaseException as error:
        given = {override.partition("=")[0] for override in overrides}
        key = str(getattr(error, "full_key", None) or "")
        said = any(key == one or one.startswith(f"{key}.") or key.startswith(f"{one}.") for one in given if key)
        raise RecipeError(_explain("override" if said else f"recipe {path}", error)) from None
    assert isinstance(recipe, Recipe)
    check_values(recipe)
    return recipe


def check_output_dir(recipe: Recipe) -> None:
    """Refuse a used output folder, unless its run is resumed: a fresh run would mix with what an older one left."""
    folder = Path(recipe.output_dir)
    if folder.exists() and not folder.is_dir():
        raise RecipeError(f"output_dir: {folder} is a file; choose another folder")
    if recipe.resume == "never" and folder.exists() and any(folder.iterdir()):
        raise RecipeError(
            f"output_dir: {folder} is not empty; choose another folder, or set resume=auto to go on there"
        )
    parent = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise RecipeError(f"output_dir: {folder} cannot be made, {parent} is not a writable folder; choose another")


def _parse(overrides: Sequence[str]) -> DictConfig:
    """The overrides as a tree, each read by itself, so that what is wrong is blamed on the one that says it."""
    changes: DictConfig | ListConfig = OmegaConf.create()
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not _KEY.fullmatch(key):
            raise RecipeError(f"override {override!r} is not key=value; write for example steps=10, without spaces")
        if not value.strip():
            raise RecipeError(f"override {override!r} has no value; write {key}=VALUE, or leave it out")
        try:
            changes = OmegaConf.merge(changes, OmegaConf.from_dotlist([override]))
        except (OmegaConfBaseException, YAMLError) as error:
            reason = " ".join(str(error).split())
            raise RecipeError(f"override {override!r} cannot be read ({reason}); correct or quote its value") from None
    assert isinstance(changes, DictConfig)
    return changes


def _require_sections(content: DictConfig | ListConfig) -> None:
    for section in dataclasses.fields(Recipe):
        value = OmegaConf.select(content, section.name)
        if dataclasses.is_dataclass(section.default_factory) and not isinstance(value, DictConfig | None):
            key = dataclasses.fields(section.default_factory)[0].name
            raise RecipeError(f"{section.name}: {value!r} is no section; give its keys, e.g. {section.name}.{key}=...")


def _explain(where: str, error: OmegaConfBaseException) -> str:
    first = str(error).splitlines()[0]
    key = getattr(error, "full_key", None)
    if "not in" in first and key:
        return f"{where}: unknown key {key}; remove it or correct its spelling"
    if "Missing mandatory value" in first or "MISSING" in type(error).__name__.upper():
        return f"{where}: {key} has no value; set it, for example {key}=..."
    return f"{where}: {f'{key}: ' if key else ''}{first}; give a value of the right type"
