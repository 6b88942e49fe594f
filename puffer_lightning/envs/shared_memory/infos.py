"""From what single environments say to what a vector environment returns."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray

from puffer_lightning.envs.shared_memory.layout import SharedBatch, tree_map
from puffer_lightning.envs.shared_memory.stepping import Outcome, RowInfo


def merge_infos(
    rows: Sequence[int], outcomes: Sequence[Outcome | None], batch: SharedBatch, final: bool
) -> dict[str, Any]:
    """The infos of B environments, in gymnasium's format.

    Args:
        rows: Which environments, [B]; the infos are in this order.
        outcomes: Of the workers that have them.
        batch: Flags and final observations.
        final: Add the final observation and info of each environment whose episode ended (SAME_STEP).

    Returns:
        Arrays [B] and their masks. ``masked`` [B] bool is there if there is a transition to leave out.
    """
    place = {row: index for index, row in enumerate(rows)}
    given = {info.row: info for outcome in outcomes if outcome for info in outcome.infos}
    ended: set[int] = set()
    if final:
        flags: NDArray[np.bool_] = batch.terminated | batch.truncated
        ended = {row for row in np.flatnonzero(flags).tolist() if row in place}
    # Gymnasium adds to the infos of as many environments as the object it is asked of has.
    merger: VectorEnv[Any, Any, Any] = VectorEnv()
    merger.num_envs = len(rows)
    infos: dict[str, Any] = {}
    for row in sorted(ended | given.keys(), key=place.__getitem__):
        said = given.get(row, RowInfo(row, {}, {}))
        if row in ended:
            last = tree_map(lambda leaf, row=row: leaf[row].copy(), batch.final_observations)
            infos = merger._add_info(infos, {"final_obs": last, "final_info": said.final_info}, place[row])
        infos = merger._add_info(infos, said.info, place[row])
    masked = [place[row] for row in _masked_rows(outcomes)]
    if masked:
        infos["masked"] = np.zeros(len(rows), dtype=np.bool_)
        infos["masked"][masked] = True
    return infos


def _masked_rows(outcomes: Sequence[Outcome | None]) -> Iterator[int]:
    return (row for outcome in outcomes if outcome for row, _ in outcome.masked)
