import pytest

from puffer_lightning.envs import threads
from puffer_lightning.envs.threads import default_threads


@pytest.mark.parametrize(
    ("processors", "ranks", "num_envs", "expected"),
    [(16, 1, 64, 16), (16, 4, 64, 4), (16, 1, 3, 3), (2, 4, 64, 1)],
)
def test_ranks_share_the_processors(
    processors: int, ranks: int, num_envs: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "processors", lambda: processors)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert default_threads(num_envs) == expected
