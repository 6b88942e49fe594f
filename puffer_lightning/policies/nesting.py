"""Dict and Tuple spaces, nested at will, as their leaves by path."""

import itertools
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
from gymnasium import spaces

Path = tuple[Any, ...]
"""Keys and indices from the outermost Dict or Tuple down to a leaf; ``()`` for a space that is one itself."""


def leaf_spaces(space: gym.Space[Any]) -> dict[Path, gym.Space[Any]]:
    """Return the spaces that are neither Dict nor Tuple, by path, in the order of the space."""
    children = _children(space)
    if children is None:
        return {(): space}
    return {
        (key, *path): leaf for key, child in children.items() for path, leaf in leaf_spaces(child).items()
    }


def select(tree: Any, path: Path) -> Any:
    """Return what a member, or a batch, of a nested space holds at a path."""
    for key in path:
        tree = tree[key]
    return tree


def template(space: gym.Space[Any]) -> Any:
    """Return the numbers of the leaves, in the order of ``leaf_spaces``, arranged as the space does."""
    numbers = itertools.count()

    def number(space: gym.Space[Any]) -> Any:
        children = _children(space)
        if children is None:
            return next(numbers)
        numbered = {key: number(child) for key, child in children.items()}
        return numbered if isinstance(space, spaces.Dict) else tuple(numbered.values())

    return number(space)


def fill(template: Any, leaves: Sequence[Any]) -> Any:
    """Arrange leaves, in the order of ``leaf_spaces``, in the dictionaries and tuples of a ``template``."""
    if isinstance(template, dict):
        return {key: fill(part, leaves) for key, part in template.items()}
    if isinstance(template, tuple):
        return tuple(fill(part, leaves) for part in template)
    return leaves[template]


def path_name(path: Path) -> str:
    """Return how to call a leaf in messages, such as ``hand/0``."""
    return "/".join(map(str, path))


def _children(space: gym.Space[Any]) -> dict[Any, gym.Space[Any]] | None:
    if isinstance(space, spaces.Dict):
        return dict(space.spaces)
    if isinstance(space, spaces.Tuple):
        return dict(enumerate(space.spaces))
    return None
