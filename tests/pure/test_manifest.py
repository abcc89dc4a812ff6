"""`evenstep manifest`: files for Kubeflow Trainer, JobSet and Slurm that their schedulers accept."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster_schemas import SCHEMAS, definition
from tests.pure.conftest import Ended

jsonschema = pytest.importorskip("jsonschema", reason="it checks the files against the schemas")
yaml = pytest.importorskip("yaml", reason="it reads the files")

TRAINING = ["/app/my_task.py", "lr=0.1", "--epochs", "10", "--audit", "note=yes: no # #"]
POD = ["--image", "registry/me/train:1"]
CASES = {
    "one machine": ["--devices", "4"],
    "several machines": ["--machines", "3", "--devices", "2", "--volume", "training:/work"],
    "CPUs": ["--machines", "2", "--devices", "cpu,cpu", "--name", "small"],
}
COMMAND = ["evenstep", "train", *TRAINING]


def documents(text: str) -> list[Any]:
    return list(yaml.safe_load_all(text))


def container(document: Any) -> Any:
    spec = document["spec"].get("template", document)["spec"]
    (job,) = spec["replicatedJobs"]
    (found,) = job["template"]["spec"]["template"]["spec"]["containers"]
    return found


@pytest.mark.parametrize("kind", ["trainjob", "jobset"])
@pytest.mark.parametrize("case", CASES)
def test_files_for_kubernetes_fit_the_published_schemas(evenstep: Callable[..., Ended], kind: str, case: str) -> None:
    made = evenstep("manifest", kind, *TRAINING, *POD, *CASES[case])
    assert made.code == 0, made.err
    found = documents(made.out)
    expected = (["Secret"] if "--machines" in CASES[case] else []) + (
        ["TrainingRuntime", "TrainJob"] if kind == "trainjob" else ["JobSet"]
    )
    assert [document["kind"] for document in found] == expected
    for document in found:
        jsonschema.validate(document, SCHEMAS[document["kind"]])
    name = "small" if case == "CPUs" else "my-task"
    ran = found[-1]["spec"]["trainer"] if kind == "trainjob" else container(found[-1])
    assert ran["command"] == [*COMMAND, "--name", name, "--resume", "auto"]


@pytest.mark.parametrize("kind", ["trainjob", "jobset"])
def test_files_for_kubernetes_fit_the_whole_definitions(evenstep: Callable[..., Ended], kind: str) -> None:
    """EVENSTEP_CRDS names a folder with CustomResourceDefinitions of Kubeflow Trainer and of JobSet."""
    folder = os.environ.get("EVENSTEP_CRDS")
    if folder is None:
        pytest.skip("EVENSTEP_CRDS does not name a folder of CustomResourceDefinitions")
    read = [one for path in Path(folder).glob("*.yaml") for one in yaml.safe_load_all(path.read_text())]
    schemas = dict(definition(one) for one in read)
    for options in CASES.values():
        for document in documents(evenstep("manifest", kind, *TRAINING, *POD, *options).out):
            if document["kind"] != "Secret":
                jsonschema.validate(document, schemas[document["kind"]])


def test_pods_of_a_jobset_find_each_other_with_torchrun_s_variables(evenstep: Callable[..., Ended]) -> None:
    secret, found = documents(evenstep("manifest", "jobset", *TRAINING, *POD, *CASES["several machines"]).out)
    variables = {one["name"]: one.get("value") or one["valueFrom"] for one in container(found)["env"]}
    assert variables == {
        "PET_NNODES": "3",
        "PET_NPROC_PER_NODE": "2",
        "PET_NODE_RANK": {
            "fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}
        },
        "PET_MASTER_ADDR": "my-task-node-0-0.my-task",
        "PET_MASTER_PORT": "29500",
        "EVENSTEP_TOKEN": {"secretKeyRef": {"name": "my-task-token", "key": "token"}},
    }
    assert secret["metadata"]["name"] == "my-task-token"
    assert len(secret["stringData"]["token"]) == 64
    assert container(found)["workingDir"] == "/work"


def test_a_preempted_pod_is_replaced_and_bad_input_is_not_repeated(evenstep: Callable[..., Ended]) -> None:
    for kind in ("jobset", "trainjob"):
        found = documents(evenstep("manifest", kind, "digits", *POD).out)[0]
        spec = found["spec"].get("template", found)["spec"]
        preempted, disrupted, refused = spec["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
        assert (preempted["action"], preempted["onExitCodes"]["values"]) == ("Ignore", [75])
        assert (disrupted["action"], disrupted["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
        assert (refused["action"], refused["onExitCodes"]["values"]) == ("FailJob", [2])
        assert spec["failurePolicy"]["rules"][0]["action"] == "FailJobSet"


def test_a_batch_script_asks_for_what_the_training_uses(evenstep: Callable[..., Ended]) -> None:
    made = evenstep("manifest", "slurm", *TRAINING, "--machines", "2", "--devices", "4")
    *options, last = made.out.splitlines()
    assert options == [
        "#!/bin/bash",
        "#SBATCH --job-name=my-task",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --signal=USR1@120",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
    ]
    assert shlex.split(last) == ["srun", *COMMAND, "--devices", "4", "--requeue"]


@pytest.mark.parametrize(
    ("words", "num"), [(["--devices", "cpu,cpu"], 2), (["--devices", "4", "--cpus", "16"], 16), (["--cpus", "3"], 3)]
)
def test_srun_gets_the_cores_that_sbatch_gets(evenstep: Callable[..., Ended], words: list[str], num: int) -> None:
    *options, last = evenstep("manifest", "slurm", "digits", *words).out.splitlines()
    assert f"#SBATCH --cpus-per-task={num}" in options
    assert last.startswith(f"srun --cpus-per-task={num} evenstep train digits --devices ")


def test_pods_request_cores_beside_their_gpus(evenstep: Callable[..., Ended]) -> None:
    (found,) = documents(evenstep("manifest", "jobset", "digits", *POD, "--devices", "4", "--cpus", "16").out)
    assert container(found)["resources"]["requests"] == {"nvidia.com/gpu": 4, "cpu": 16}
    (alone,) = documents(evenstep("manifest", "jobset", "digits", *POD, "--devices", "4").out)
    assert container(alone)["resources"]["requests"] == {"nvidia.com/gpu": 4}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("jobset digits", "Missing option '--image'"),
        ("slurm digits --epoch 3", "No such option: --epoch"),
        ("slurm digits --epochs three", "--epochs is 'three'"),
        ("slurm digits --devices 0", "--devices is '0'"),
        ("slurm digits --devices cpu,cuda:0", "--devices is 'cpu,cuda:0'; write the GPUs of each machine, such as 4"),
        ("slurm digits --machines 0", "--machines is 0; give 1 or more"),
        ("slurm digits --strategy foo", "unknown strategy 'foo'; choose single, dp, ddp"),
        ("slurm gone.py --strategy foo", "unknown strategy 'foo'; choose single, dp, ddp"),
        ("slurm digit", "no task called 'digit'; did you mean digits?"),
        ("slurm digits lrr=3", "task() has no option lrr"),
        ("slurm digits --requeue", "leave --requeue out: the script for Slurm has it already"),
        ("slurm digits --image a:1", "--image is an option of evenstep manifest jobset and trainjob"),
        ("slurm digits --rendezvous here:1", "leave --rendezvous out: under Slurm, evenstep finds the first node"),
        ("slurm digits -- --name mine", "leave --name out: under Slurm, a run is named after its task and its job"),
        ("slurm digits -- --machines=2", "write --machines before --: the generated file sets it"),
        ("jobset digits --image x --rendezvous here:1", "leave --rendezvous out: pods find each other by torchrun's"),
        ("trainjob digits --image x -- --name mine", "write --name before --: it names both the job and the run"),
        ("slurm --audit digits", "expected TASK, found --audit; write TASK first"),
        ("slurm digits --name Mine", "'Mine' cannot name a job; use up to 50 of a to z"),
        (
            "jobset digits --image x --volume training",
            "--volume is 'training'; write CLAIM:PATH, such as training:/work",
        ),
    ],
)
def test_what_no_cluster_would_run_is_refused_in_one_line(
    evenstep: Callable[..., Ended], words: str, said: str
) -> None:
    ended = evenstep("manifest", *words.split())
    assert (ended.code, said in ended.err, ended.out) == (2, True, ""), ended


def test_a_task_that_is_not_here_is_said_not_to_be_checked(evenstep: Callable[..., Ended]) -> None:
    made = evenstep("manifest", "slurm", "/app/my_task.py", "lr=0.1")
    assert (made.code, made.out.splitlines()[-1]) == (
        0,
        "srun evenstep train /app/my_task.py lr=0.1 --devices 1 --requeue",
    )
    assert made.err == "the options of /app/my_task.py are not checked: there is no file /app/my_task.py here\n"
    Path("my_task.py").write_text("import a_package_of_the_cluster\n")
    made = evenstep("manifest", "slurm", "my_task.py", "lr=0.1")
    assert (made.code, "are not checked: my_task.py cannot be imported: ModuleNotFoundError" in made.err) == (0, True)


def test_what_a_task_prints_is_not_in_the_file(evenstep: Callable[..., Ended]) -> None:
    Path("loud.py").write_text("print('Using device: cpu')\nfrom evenstep.tasks.digits import task\n")
    made = evenstep("manifest", "slurm", "loud.py")
    assert (made.code, made.out.splitlines()[0]) == (0, "#!/bin/bash")
    assert "Using device: cpu" in made.err


def test_without_a_volume_it_says_what_is_lost(evenstep: Callable[..., Ended]) -> None:
    assert "lost with its pods" in evenstep("manifest", "jobset", "digits", *POD).err
    assert evenstep("manifest", "jobset", "digits", *POD, "--volume", "training:/work").err == ""
