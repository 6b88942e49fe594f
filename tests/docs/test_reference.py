import csv
import re
import sys
from pathlib import Path

import pytest
import yaml

from puffer_lightning.cli import main
from puffer_lightning.shipped import shipped_configs
from tests.docs.documents import DOCUMENTS, ROOT


def test_links_lead_somewhere() -> None:
    links = [
        (document, link)
        for document in DOCUMENTS
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8"))
    ]
    assert links
    broken = [f"{document.name}: {link}" for document, link in links if not (document.parent / link).exists()]
    assert not broken


def test_the_index_lists_every_decision() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    decisions = [path.name for path in (ROOT / "docs" / "adr").glob("*.md")]
    assert decisions
    assert [name for name in decisions if f"(adr/{name})" not in index.partition("## Decisions")[2]] == []


def test_the_reference_names_every_metric_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["puffer_lightning"])
    options = ["--data.total_timesteps=512", "--data.num_envs=8", "--data.eval_episodes=2"]
    main(["fit", *options, "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"])
    with next(tmp_path.rglob("metrics.csv")).open(encoding="utf-8") as file:
        logged = set(next(csv.reader(file))) - {"epoch", "step"}
    text = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    table = text.partition("## Metrics")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("|")]
    assert {name for row in rows for name in re.findall(r"`(\w+/\w+)`", row)} == logged


def test_the_trace_has_the_sizes_of_the_default_task() -> None:
    data = yaml.safe_load((shipped_configs() / "ppo.yaml").read_text(encoding="utf-8"))["data"]
    horizon, num_envs, total = (data[name] for name in ("horizon", "num_envs", "total_timesteps"))
    trace = " ".join((ROOT / "docs" / "README.md").read_text(encoding="utf-8").split())
    assert f"T = {horizon} and `num_envs` N = {num_envs}" in trace
    assert f"= {horizon * num_envs} transitions" in trace
    assert f"{total:,} `total_timesteps` take {-(-total // (horizon * num_envs))} rollouts" in trace
