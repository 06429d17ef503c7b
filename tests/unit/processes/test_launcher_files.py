"""Scripts and manifests for other launchers: what their own parsers take, and what the loop needs is in them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainloop._launch import rank_from_launcher

FOLDER = Path(__file__).parents[3] / "examples" / "launchers"
SLURM = ["bash", str(FOLDER / "slurm.sbatch")]


def manifest(name: str) -> Any:
    (document,) = yaml.safe_load_all((FOLDER / name).read_text())
    return document


def pods(name: str) -> list[Any]:
    spec = manifest(name)["spec"]
    if name == "pytorchjob.yaml":
        return [replica["template"]["spec"] for replica in spec["pytorchReplicaSpecs"].values()]
    return [job["template"]["spec"]["template"]["spec"] for job in spec["replicatedJobs"]]


@pytest.mark.parametrize("name", ["pytorchjob.yaml", "jobset.yaml"])
def test_pods_have_what_a_training_needs(name: str) -> None:
    for pod in pods(name):
        (container,) = pod["containers"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
        assert "persistentVolumeClaim" in volumes[mounts["/checkpoints"]]
        assert pod["terminationGracePeriodSeconds"] > 30  # Kubernetes' own, too short for a large checkpoint
        assert "TRAINLOOP_KEY" in {variable["name"] for variable in container["env"]}


def test_the_pytorchjob_starts_as_many_ranks_as_it_has_gpus() -> None:
    spec = manifest("pytorchjob.yaml")["spec"]
    for pod in pods("pytorchjob.yaml"):
        (container,) = pod["containers"]
        assert container["name"] == "pytorch"  # the operator looks for this name
        assert int(spec["nprocPerNode"]) == container["resources"]["limits"]["nvidia.com/gpu"]


def test_the_jobset_gives_torchrun_what_it_takes() -> None:
    from torch.distributed.run import get_args_parser

    found = manifest("jobset.yaml")
    (job,) = found["spec"]["replicatedJobs"]
    inner = job["template"]["spec"]
    (container,) = inner["template"]["spec"]["containers"]
    program, *command = container["command"]
    assert program == "torchrun"
    arguments = get_args_parser().parse_args([part.replace("$(JOB_COMPLETION_INDEX)", "1") for part in command])
    assert int(arguments.nnodes) == inner["completions"] == inner["parallelism"]
    assert int(arguments.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    # The name that JobSet gives to pod 0 of the first job: <set>-<job>-<replica>-<pod>.<set>
    assert arguments.master_addr == f"{found['metadata']['name']}-{job['name']}-0-0.{found['metadata']['name']}"
    assert inner["completionMode"] == "Indexed"


def slurm_job(folder: Path, training: str) -> dict[str, Any]:
    """How to run the script where Slurm's programs, and the training, are other scripts."""
    for name, body in {
        "scontrol": 'if [ "$1" = show ]; then echo node7; echo node8; else echo "scontrol $*"; fi',
        "srun": 'shift; env | grep -E "^(MASTER|TRAINLOOP)" | sort; stat -c %a "$TRAINLOOP_KEY"; echo "$@"\n'
        + training,
        "python": f'exec {sys.executable} "$@"',
    }.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    environment = {
        "PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(folder), "SLURM_JOB_ID": "5",
        "SLURM_JOB_NODELIST": "node[7-8]",
    }  # fmt: skip
    return {"env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


# When its time is over: what the ranks make of the signal, the job's status, and whether it goes on later.
@pytest.mark.parametrize(
    ("on_signal", "status", "requeued"),
    [("sleep 0.3; exit 138", 138, True), ("sleep 0.3; exit 0", 0, False), (":; sleep 0.3; exit 1", 1, True)],
    ids=["a checkpoint", "the training was done", "they failed"],
)
def test_a_slurm_job_whose_time_is_over(tmp_path: Path, on_signal: str, status: int, requeued: bool) -> None:
    training = f"trap '{on_signal}' USR1\necho ready\nfor i in $(seq 600); do sleep 0.1; done"
    with subprocess.Popen(SLURM, **slurm_job(tmp_path, training)) as job:
        assert job.stdout is not None
        for line in job.stdout:
            if line == "ready\n":
                break
        job.send_signal(signal.SIGUSR1)  # to the script alone, as --signal=B: does
        said = job.stdout.read()
    assert job.returncode == status
    assert said == "scontrol requeue 5\n" * requeued
    assert not (tmp_path / ".trainloop-5").exists()


def test_the_slurm_script_is_one(tmp_path: Path) -> None:
    text = (FOLDER / "slurm.sbatch").read_text()
    head = text.split("\nset -euo", 1)[0].splitlines()
    options = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in head if line.startswith("#SBATCH"))
    assert options["signal"].startswith("B:USR1@")  # to the script, which passes on what the loop takes for its end
    # With stand-ins for what Slurm has, it starts python once a task, with all that joining needs.
    done = subprocess.run(SLURM, **slurm_job(tmp_path, "echo done"), check=True, timeout=60)
    key = tmp_path / ".trainloop-5"
    assert done.stdout.splitlines() == [
        "MASTER_ADDR=node7", "MASTER_PORT=29500", f"TRAINLOOP_KEY={key}", "600", "python train.py", "done"
    ]  # fmt: skip
    assert not key.exists()
    tasks = int(options["nodes"]) * int(options["ntasks-per-node"])
    of_task = {"SLURM_PROCID": "5", "SLURM_NTASKS": str(tasks), "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
    place = rank_from_launcher({**of_task, "SLURM_NNODES": options["nodes"], "SLURM_JOB_NAME": options["job-name"]})
    assert place is not None
    assert (place.rank, place.world_size, place.local_world_size, place.num_nodes) == (5, 8, 4, 2)


def test_the_torchrun_script_passes_what_torchrun_takes(tmp_path: Path) -> None:
    from torch.distributed.run import get_args_parser

    (tmp_path / "torchrun").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HEAD": "10.0.0.1", "NODES": "2", "RANKS": "4"}
    done = subprocess.run(
        ["bash", str(FOLDER / "torchrun.sh"), "train.py", "--lr", "1"],
        env=environment, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    arguments = get_args_parser().parse_args(done.stdout.splitlines())
    assert (arguments.nnodes, arguments.nproc_per_node, arguments.rdzv_endpoint) == ("2", "4", "10.0.0.1:29400")
    assert (arguments.training_script, arguments.training_script_args) == ("train.py", ["--lr", "1"])
