"""Invariant 7: compiled ≡ eager, to tolerance."""

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from tests.compiling import needs_compiler
from tests.equivalence.runs import by_fabric, differ, without_time

pytestmark = [pytest.mark.slow, needs_compiler]


@pytest.mark.parametrize(
    ("env", "options"),
    [("CartPole-v1", {"accumulate_grad_batches": 2}), ("Pendulum-v1", {"clip_value_loss": True})],
)
def test_compiled_and_eager_runs_end_near_each_other(
    env: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compilations: set[str] = set()
    compile_function = torch.compile

    def counted(function: Any, **options: Any) -> Any:
        compilations.add(function.__name__)
        return compile_function(function, **options)

    monkeypatch.setattr(torch, "compile", counted)
    eager, eager_metrics = by_fabric(env, 2, **options)
    assert not compilations
    compiled, compiled_metrics = by_fabric(env, 2, compile=True, **options)
    assert compilations == {"minibatch_loss", "_act", "_minibatch"}
    untrained, _ = by_fabric(env, 2, max_grad_norm=1e-30, **options)
    assert differ(untrained, eager)
    for name, weights in eager.items():
        assert_close(compiled[name], weights, rtol=1e-3, atol=1e-4)
    # Pendulum's value loss is in the thousands, and its gradient is clipped by a norm alike.
    assert without_time(compiled_metrics) == pytest.approx(without_time(eager_metrics), rel=1e-2, abs=1e-4)
