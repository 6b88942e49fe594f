"""A rank that trains nothing: it adds numbers up with the others, and fails as told.

    python -m tests.faulty_rank FAULT RANK SECONDS FOLDER THROUGH

It leaves its process id in the folder. THROUGH is memory or gloo.
"""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from puffer_lightning.distributed import global_sum
from puffer_lightning.distributed.exchange import exchange_for
from puffer_lightning.errors import ConfigurationError
from puffer_lightning.launch import end_rank, end_with_launcher


def main(fault: str, failing: int, seconds: float, folder: Path, through: str) -> None:
    end_with_launcher()
    rank, of_all = int(os.environ["RANK"]), failing < 0
    (folder / str(os.getpid())).touch()
    try:
        dist.init_process_group("gloo")
        dist.barrier()
        # Not before: until here one may take much longer than the other.
        _set_pg_timeout(timedelta(seconds=seconds))
        for step in range(10**6):
            if step == 3 and (of_all or rank == failing):
                fail(fault)
            if through == "memory":
                assert exchange_for(torch.ones(1)) is not None
                global_sum(torch.ones(1))
            else:
                dist.all_reduce(torch.ones(1))
    except ConfigurationError as problem:
        end_rank(problem, str(problem))
    except Exception as failure:
        end_rank(failure)


def fail(fault: str) -> None:
    if fault == "raise":
        raise ValueError("the pole broke")
    if fault == "refuse":
        # Ranks are never at the same place at the same time.
        time.sleep(0.03 * int(os.environ["RANK"]))
        raise ConfigurationError("gamma is 2: set it to less.")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "hang":
        time.sleep(10**6)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4]), sys.argv[5])
