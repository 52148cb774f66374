"""The recipe: what a training run is, in one YAML file. Typed, checked before anything starts or is written."""

from zmrl.recipe.load import check_output_dir, load_recipe
from zmrl.recipe.schema import Recipe, RecipeError

__all__ = ["Recipe", "RecipeError", "check_output_dir", "load_recipe"]
