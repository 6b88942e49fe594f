"""How long ranks wait for the slowest of them."""

from collections.abc import Sequence
from statistics import mean, median


def straggler_metrics(seconds: Sequence[Sequence[float]]) -> dict[str, float]:
    """Which rank collected the longest, and what that cost the others.

    The update is in lockstep: its reductions make every rank take as long as the slowest. So ranks are told
    apart by their rollouts, where nobody waits; since the policy acts there, a slow processor shows, too.

    Args:
        seconds: [ranks, 2], of the rollout and of the update; two ranks or more.

    Returns:
        ``slowest``, a rank; ``slowdown``, its rollout's time over the median of the others'; and
        ``waiting_share``, of the iteration, averaged over ranks: ``(max - mean) / iteration``.
    """
    rollouts = [rollout for rollout, _ in seconds]
    longest = max(rollouts)
    slowest = rollouts.index(longest)
    return {
        "slowest": float(slowest),
        "slowdown": longest / median(rollouts[:slowest] + rollouts[slowest + 1 :]),
        "waiting_share": (longest - mean(rollouts)) / max(sum(of_rank) for of_rank in seconds),
    }
