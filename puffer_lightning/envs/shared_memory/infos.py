"""From what single environments say to what a vector environment returns."""

from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray

from puffer_lightning.envs.shared_memory.layout import SharedBatch, tree_map
from puffer_lightning.envs.shared_memory.stepping import Outcome


def final_infos(rows: NDArray[np.intp], ended: NDArray[np.bool_], batch: SharedBatch) -> dict[str, Any]:
    """The final observations of the environments whose episodes ended (SAME_STEP), in gymnasium's format.

    Args:
        rows: Which environments are asked about, [B], ascending.
        ended: [B], whose episodes ended.
        batch: Where their final observations are.

    Returns:
        Arrays [B] and their masks.
    """
    observations = np.full(len(rows), None, dtype=object)
    for index in np.flatnonzero(ended).tolist():
        row = rows[index]
        observations[index] = tree_map(lambda leaf, row=row: leaf[row].copy(), batch.final_observations)
    return {
        "final_obs": observations,
        "_final_obs": ended,
        "final_info": {},
        "_final_info": ended.copy(),
    }


def merge_infos(
    rows: NDArray[np.intp], outcomes: Sequence[Outcome | None], infos: dict[str, Any]
) -> dict[str, Any]:
    """Add what B environments said to their infos, in gymnasium's format.

    Args:
        rows: Which environments, [B], ascending; the infos are in this order.
        outcomes: Of the workers that have them.
        infos: From :func:`final_infos`, or empty.

    Returns:
        Arrays [B] and their masks. ``masked`` [B] bool is there if there is a transition to leave out.
    """
    place = {row: index for index, row in enumerate(rows.tolist())}
    # Gymnasium adds to the infos of as many environments as the object it is asked of has.
    merger: VectorEnv[Any, Any, Any] = VectorEnv()
    merger.num_envs = len(rows)
    given = [info for outcome in outcomes if outcome for info in outcome.infos]
    for row, info, final_info in sorted(given, key=itemgetter(0)):
        if final_info:
            infos = merger._add_info(infos, {"final_info": final_info}, place[row])
        infos = merger._add_info(infos, info, place[row])
    masked = [place[row] for row in _masked_rows(outcomes)]
    if masked:
        infos["masked"] = np.zeros(len(rows), dtype=np.bool_)
        infos["masked"][masked] = True
    return infos


def _masked_rows(outcomes: Sequence[Outcome | None]) -> Iterator[int]:
    return (row for outcome in outcomes if outcome for row, _ in outcome.masked)
