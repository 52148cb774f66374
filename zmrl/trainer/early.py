"""Actors whose processes start, and import for ten seconds on one core, before verl comes to create them.

verl starts its processes one after the other. An early actor is created without arguments; when verl creates it, it
gets them.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import ray

_started: dict[type, Early] = {}


def start(actor_class: type, *modules: str, **options: Any) -> None:
    """Start the process of the one `actor_class` of this run, on this node.

    modules: those of the actors whose handles it will be given, which Ray would import when they arrive.
    options: what verl will ask for and Ray can only set at the start, such as a name.
    """
    _started[actor_class] = Early(actor_class, modules, options)


def actor_class(plain: type) -> Any:
    """The actor class that verl is to use: one that gives it the early actor, if there is one."""
    return _started.pop(plain, None) or ray.remote(plain)


class Early:
    """Stands where verl expects an actor class: what verl creates of it is the actor that has been started."""

    def __init__(self, plain: type, modules: tuple[str, ...], options: dict[str, Any]) -> None:
        self._options = options
        self._handle = ray.remote(_without_arguments(plain)).options(**options).remote(modules)

    def options(self, **given: Any) -> Early:
        """RuntimeError if verl asks for other values than those the actor was started with."""
        for name, value in self._options.items():
            if given.get(name) != value:
                raise RuntimeError(
                    f"verl asks for an actor with {name} {given.get(name)!r}, which was started early with {value!r}; "
                    "adapt the caller of zmrl.trainer.early"
                )
        return self

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """The actor, constructed; raises what its constructor raises."""
        ray.get(self._handle.zmrl_construct.remote(*args, **kwargs))
        return self._handle


def _without_arguments(plain: type) -> type:
    """`plain` whose constructor's work is a method of its own."""

    def __init__(self: Any, modules: tuple[str, ...]) -> None:
        for module in modules:
            import_module(module)

    def zmrl_construct(self: Any, *args: Any, **kwargs: Any) -> None:
        plain.__init__(self, *args, **kwargs)  # type: ignore[misc]

    return type(plain.__name__, (plain,), {"__init__": __init__, "zmrl_construct": zmrl_construct})
