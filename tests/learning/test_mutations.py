"""A broken PPO does not reach the score that the right one does: the suite would notice.

That the right one does reach it is asserted in ``test_sanity_suite``.
"""

from pathlib import Path

import pytest
from gymnasium.vector import AutoresetMode

from puffer_lightning.envs.sanity import SANITY_ENVS
from tests.learning.mutations import MUTATIONS, Mutation
from tests.learning.training import score

ROOT = Path(__file__).parents[2]
CAUGHT = [(mutation, *setting) for mutation in MUTATIONS for setting in mutation.caught_by]


@pytest.mark.parametrize(
    ("mutation", "env", "mode"),
    CAUGHT,
    ids=[f"{mutation.name.replace(' ', '_')}-{env}-{mode.value}" for mutation, env, mode in CAUGHT],
)
def test_a_broken_ppo_does_not_solve(
    mutation: Mutation, env: str, mode: AutoresetMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = mutation.apply(monkeypatch)
    assert score(env, mode) < SANITY_ENVS[env].solved_at
