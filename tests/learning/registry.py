"""What a mutation is, and the list of all."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from gymnasium.vector import AutoresetMode

Function = Callable[..., Any]
Setting = tuple[str, AutoresetMode]
"""An environment's id and how it resets."""


@dataclass(frozen=True)
class Mutation:
    """A broken PPO.

    Attributes:
        name: What it does, in words.
        target: Module or class.
        attribute: The function of it that is replaced.
        broken: Stands in for the function, which it is given as its first argument.
        caught_by: Settings that ``test_mutations`` asserts to fall short of ``solved_at``.
        caught_elsewhere: The test that fails instead, as pytest names it, where no environment notices.
    """

    name: str
    target: Any
    attribute: str
    broken: Function
    caught_by: tuple[Setting, ...]
    caught_elsewhere: str

    def apply(self, patch: pytest.MonkeyPatch) -> None:
        """Replace the function until the patch is undone."""
        original, broken = getattr(self.target, self.attribute), self.broken
        # A plain function, so that it binds as a method where the original does.
        patch.setattr(self.target, self.attribute, lambda *args, **kwargs: broken(original, *args, **kwargs))


MUTATIONS: list[Mutation] = []


def mutation(
    target: Any,
    attribute: str,
    *caught_by: str,
    modes: tuple[AutoresetMode, ...] = (AutoresetMode.NEXT_STEP,),
    elsewhere: str = "",
) -> Callable[[Function], Function]:
    """Register a function as a mutation of ``target.attribute``; see :class:`Mutation`.

    Args:
        target: Module or class.
        attribute: The function of it that is replaced.
        caught_by: Names of environments, without ``puffer/`` and ``-v0``.
        modes: In which modes each of them catches it.
        elsewhere: See ``caught_elsewhere``.
    """

    def register(broken: Function) -> Function:
        name = broken.__name__.replace("_", " ")
        settings = tuple((f"puffer/{env}-v0", mode) for env in caught_by for mode in modes)
        MUTATIONS.append(Mutation(name, target, attribute, broken, settings, elsewhere))
        return broken

    return register
