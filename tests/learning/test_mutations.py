"""A broken PPO does not reach the score that the right one does: the suite would notice.

That the right one does reach it is asserted in ``test_sanity_suite``.
"""

from pathlib import Path

import pytest
from gymnasium.vector import AutoresetMode

from puffer_lightning.envs.sanity import SANITY_ENVS
from tests.learning.mutations import MUTATIONS
from tests.learning.registry import Mutation
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
    mutation.apply(monkeypatch)
    assert score(env, mode) < SANITY_ENVS[env].solved_at


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "_"))
def test_every_mutation_is_caught_somewhere(mutation: Mutation) -> None:
    if mutation.caught_by:
        return
    path, _, name = mutation.caught_elsewhere.partition("::")
    assert f"def {name}(" in (ROOT / path).read_text()


def test_the_document_lists_every_mutation() -> None:
    document = (ROOT / "docs" / "mutations.md").read_text()
    assert [mutation.name for mutation in MUTATIONS if f"| {mutation.name} |" not in document] == []
