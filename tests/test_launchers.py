"""The command line in several processes, however they are started: one run, that says everything once."""

import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
import yaml
from nbclient import NotebookClient

from tests.commandline import QUICK, STEPS_PER_ITERATION, metrics
from tests.distributed.processes import free_port
from tests.docs.documents import ROOT, blocks

STEPS = 2 * 2 * STEPS_PER_ITERATION
FIT = ["-m", "puffer_lightning", "fit", *QUICK, f"--data.total_timesteps={STEPS}", "--trainer.strategy=ddp"]
TORCHRUN = str(Path(sysconfig.get_path("scripts"), "torchrun"))

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def run_together(commands: list[list[str]], environments: list[dict[str, str]] | None = None) -> list[str]:
    """Run the commands at the same time; what each said. All have to succeed."""
    processes = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | environment
        )
        for command, environment in zip(commands, environments or [{}] * len(commands), strict=True)
    ]
    try:
        said = [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, said, strict=True):
        assert process.returncode == 0, output
    return said


def assert_one_run_of_two_ranks(said: str) -> None:
    assert said.count("2 ranks × 8 environments × 16 steps: 256 steps a rollout, 4 minibatches of 64") == 1
    assert said.count(f"evaluation after {STEPS} steps: 2 greedy episodes") == 1
    assert [path.name for path in Path("lightning_logs").iterdir()] == ["version_0"]
    assert [int(row["step"]) for row in metrics() if "train/entropy" in row] == [STEPS // 2, STEPS]
    assert Path("lightning_logs/version_0/checkpoints/last.ckpt").is_file()


def test_devices_alone_start_the_other_ranks() -> None:
    [said] = run_together([[sys.executable, *FIT, "--trainer.devices=2"]])
    assert_one_run_of_two_ranks(said)


def test_ranks_that_share_environments_split_them_with_nobody() -> None:
    [said] = run_together(
        [
            [
                *(sys.executable, "-m", "puffer_lightning", "fit", *QUICK),
                *("--data.num_envs=1", "--data.split_envs=true", "--data.total_timesteps=32"),
                *("--model.policy=puffer_lightning.policies.TransformerPolicy", "--model.num_minibatches=1"),
                *("--model.policy.hidden_size=16", "--model.policy.num_blocks=1", "--trainer.devices=2"),
                *("--trainer.strategy=FSDP", "--trainer.strategy.tensor_parallel_size=2"),
            ]
        ]
    )
    assert said.count("evaluation after 32 steps") == 1


def test_torchrun_starts_all_ranks() -> None:
    [said] = run_together([[TORCHRUN, "--standalone", "--nproc-per-node=2", *FIT, "--trainer.devices=2"]])
    assert_one_run_of_two_ranks(said)


def on_node(rank: int, endpoint: str) -> list[str]:
    nodes = ["--nnodes=2", f"--node-rank={rank}", "--nproc-per-node=1", f"--rdzv-endpoint={endpoint}"]
    return [TORCHRUN, *nodes, *FIT, "--trainer.num_nodes=2", "--trainer.devices=1"]


def test_torchrun_on_two_nodes() -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    first, second = run_together([on_node(rank, endpoint) for rank in range(2)])
    assert_one_run_of_two_ranks(first)
    assert "evaluation" not in second


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[tuple[str, str]]]:
    """Two hosts on this machine, joined by a cable: names and addresses."""
    names = [f"puffer{os.getpid()}{side}" for side in "ab"]
    cables = [f"cable{os.getpid()}{side}"[-15:] for side in "ab"]
    addresses = ["10.77.0.1", "10.77.0.2"]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", cables[0], "netns", names[0], "type", "veth", "peer", cables[1], "netns", names[1])
        for name, cable, address in zip(names, cables, addresses, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
            ip("-n", name, "link", "set", cable, "up")
            ip("-n", name, "link", "set", "lo", "up")
        # A host knows the other's name; asking a server, which neither can reach, would take long.
        Path("hosts").write_text(f"127.0.0.1 localhost {socket.gethostname()}\n10.77.0.1 a\n10.77.0.2 b\n")
        Path("resolv.conf").touch()
        subprocess.run(["ip", "netns", "exec", names[0], "unshare", "--mount", "true"], check=True)
    except (OSError, subprocess.CalledProcessError) as problem:
        remove(names)
        pytest.skip(f"no network namespaces can be made here: {problem}")
    yield list(zip(names, cables, strict=True))
    remove(names)


def remove(names: list[str]) -> None:
    for name in names:
        if shutil.which("ip"):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def test_torchrun_on_two_hosts(hosts: list[tuple[str, str]]) -> None:
    known = " && ".join(f"mount --bind {name} /etc/{name}" for name in ("hosts", "resolv.conf"))
    commands = []
    for rank, (name, _) in enumerate(hosts):
        within = [
            "ip",
            "netns",
            "exec",
            name,
            "unshare",
            "--mount",
            "sh",
            "-c",
            f'{known} && exec "$@"',
            "sh",
        ]
        commands.append([*within, *on_node(rank, "10.77.0.1:29500")])
    first, second = run_together(commands, [{"GLOO_SOCKET_IFNAME": cable} for _, cable in hosts])
    assert_one_run_of_two_ranks(first)
    assert "evaluation" not in second


def test_slurm_starts_one_task_a_rank() -> None:
    job = {
        "SLURM_JOB_ID": str(free_port()),
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": "localhost",
    }
    tasks = [job | {"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)} for task in range(2)]
    first, second = run_together([[sys.executable, *FIT, "--trainer.devices=2"]] * 2, tasks)
    assert_one_run_of_two_ranks(first)
    assert "evaluation" not in second


def test_ranks_with_other_options_are_refused_in_one_sentence() -> None:
    for rank in range(2):
        options = {"data": {"env": "CartPole-v1", "num_envs": 8 + rank}, "model": {"gamma": 0.9 + rank / 100}}
        Path(f"rank{rank}.yaml").write_text(yaml.safe_dump(options))
    fit = [sys.executable, "-m", "puffer_lightning", "fit", *QUICK[1:], "--trainer.devices=2"]
    script = f"exec {' '.join(fit)} --trainer.strategy=ddp --config=rank$RANK.yaml"
    command = [TORCHRUN, "--standalone", "--nproc-per-node=2", "--no-python", "sh", "-c", script]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert refused.returncode
    assert re.findall("^error: .*", refused.stderr, re.MULTILINE) == [
        "error: The ranks were started with different options: data.num_envs is 8 on rank 0 and 9 on rank 1, "
        "model.gamma is 0.9 on rank 0 and 0.91 on rank 1; start all of them with the same command and "
        "configuration."
    ]


def test_the_script_of_the_documents_trains_on_two_ranks() -> None:
    [script] = [block.text for block in blocks(ROOT / "docs" / "README.md") if block.file == "two_ranks.py"]
    Path("two_ranks.py").write_text(script)
    [said] = run_together([[sys.executable, "two_ranks.py"]])
    assert re.findall(r"^\d+ (?=0\.)", said, re.MULTILINE) == ["256 ", "512 ", "768 ", "1024 "]
    assert said.count("comm_hook fp16: each rank sent") == 1
    assert "50% less." in said


CELLS = (
    """
import lightning as L
from lightning.fabric import Fabric
from puffer_lightning import PPO, RolloutDataModule, iterations

def make():
    return PPO(sync_check_every=1), RolloutDataModule(
        "CartPole-v1", num_envs=8, horizon=16, total_timesteps=512, eval_episodes=2
    )

def train(fabric):
    fabric.seed_everything(1, verbose=False)
    model, data = make()
    *_, metrics = iterations(fabric, model, data)
    data.close()
    return fabric.world_size, model.env_steps, metrics["train/entropy"]

fabric = Fabric(strategy="ddp_notebook", devices=2, accelerator="cpu")
ranks, env_steps, entropy = fabric.launch(train)
assert (ranks, env_steps) == (2, 512), (ranks, env_steps)
""",
    """
L.seed_everything(1, verbose=False)
model, data = make()
model.build(data)
data.close()
before = model.policy.critic.weight.clone()
options = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, num_sanity_val_steps=0)
trainer = L.Trainer(strategy="ddp_notebook", devices=2, accelerator="cpu", max_epochs=-1, **options)
trainer.fit(model, datamodule=data)
assert abs(trainer.callback_metrics["train/entropy"].item() - entropy) < 1e-6
assert (model.policy.critic.weight != before).any()
assert len(data.evaluate(model.policy).returns) == 2
""",
)


def test_a_notebook_forks_its_ranks() -> None:
    cells = [nbformat.v4.new_code_cell(cell) for cell in CELLS]  # type: ignore[no-untyped-call]
    notebook = nbformat.v4.new_notebook(cells=cells)  # type: ignore[no-untyped-call]
    NotebookClient(notebook, timeout=200).execute()
