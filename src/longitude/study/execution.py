"""The options that decide where a study runs. Importing this does not load torch."""

import os
from dataclasses import dataclass
from typing import Literal

from longitude.runs.device import cores
from longitude.study.config import StudyConfig, option, require_at_least
from longitude.study.executors import Executor, InProcess, Workers


@dataclass(frozen=True, kw_only=True)
class Execution:
    """Options for running the trials of a study; they change no result.

    Args:
        workers: Models to train in parallel on this machine, each in a separate process; by default one per GPU, or as many
            as the cores allow with --threads each.
        executor: local: on this machine. ray: as tasks of Ray, on this machine or a cluster (`pip install 'longitude[ray]'`).
        ray_address: Address of the cluster, HOST:PORT or auto; by default RAY_ADDRESS, or Ray on this machine alone.
        cpus_per_trial: Cores that Ray reserves for a model; by default its --threads.
        gpus_per_trial: GPUs that Ray reserves for a model; fractions are allowed; by default 1 with --device cuda.
    """

    workers: int | None = None
    executor: Literal["local", "ray"] = "local"
    ray_address: str | None = None
    cpus_per_trial: float | None = None
    gpus_per_trial: float | None = None

    def of(self, config: StudyConfig, trials: int) -> Executor:
        """The executor for this many trials of a study. ValueError for options that do not go together."""
        device, threads = config.device, config.threads
        ray_only = ("ray_address", "cpus_per_trial", "gpus_per_trial")
        foreign = ("workers",) if self.executor == "ray" else ray_only
        if given := [option(name) for name in foreign if getattr(self, name) is not None]:
            raise ValueError(f"{given[0]} has no meaning with --executor {self.executor}; leave one of them out")
        require_at_least(self, workers=1, cpus_per_trial=0, gpus_per_trial=0)
        if self.executor == "ray":
            from longitude.study.ray_cluster import RayCluster

            cpus = threads if self.cpus_per_trial is None else self.cpus_per_trial
            gpus = float(device == "cuda") if self.gpus_per_trial is None else self.gpus_per_trial
            cluster = RayCluster(self.ray_address, cpus, gpus)
            cluster.check()
            return cluster
        gpus_here = _gpus() if device == "cuda" else ()
        workers = self.workers
        if workers is None:
            workers = len(gpus_here) if gpus_here else max(1, cores() // threads) if device == "cpu" else 1
        workers = min(workers, trials)
        return Workers(workers, gpus_here) if workers > 1 else InProcess()


def _gpus() -> tuple[str, ...]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return tuple(named.split(",") if named else map(str, range(torch.cuda.device_count())))
