"""PPO solves every environment of the sanity suite."""

import pytest
from gymnasium.vector import AutoresetMode

from puffer_lightning.envs.sanity import SANITY_ENVS
from tests.learning.registry import Setting
from tests.learning.training import MODE_MATTERS, score

SETTINGS: list[Setting] = [
    (env, mode)
    for env in SANITY_ENVS
    for mode in (AutoresetMode if env in MODE_MATTERS else [AutoresetMode.NEXT_STEP])
]


@pytest.mark.parametrize(("env", "mode"), SETTINGS, ids=[f"{env}-{mode.value}" for env, mode in SETTINGS])
def test_ppo_solves(env: str, mode: AutoresetMode) -> None:
    assert score(env, mode) >= SANITY_ENVS[env].solved_at
