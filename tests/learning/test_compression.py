"""Two ranks that send their gradients compressed learn the sanity suite's tasks all the same."""

import pytest
from gymnasium.vector import AutoresetMode
from lightning.fabric import Fabric

from puffer_lightning.distributed import CommHook
from puffer_lightning.engines import FabricDDP
from puffer_lightning.envs.sanity import SANITY_ENVS
from tests.distributed.processes import RANKS, run_ranks
from tests.learning.training import score

ENV = "puffer/MultiDiscreteMatch-v0"


def score_of_rank(rank: int, comm_hook: CommHook) -> tuple[float, float]:
    """The score, and the share of the bytes that was sent."""
    strategy = FabricDDP(comm_hook=comm_hook)
    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy=strategy)
    fabric.launch()
    reached = score(ENV, AutoresetMode.NEXT_STEP, fabric=fabric)
    compression = strategy.compression
    assert compression is not None
    return reached, compression.bytes_sent / compression.bytes_before


@pytest.mark.slow
@pytest.mark.parametrize(("comm_hook", "share"), [("fp16", 0.5), ("bf16", 0.5), ("powersgd", 0.3)])
def test_compressed_gradients_solve_it(comm_hook: CommHook, share: float) -> None:
    for reached, sent in run_ranks(score_of_rank, comm_hook):
        assert reached >= SANITY_ENVS[ENV].solved_at
        assert sent <= share
