"""Functions, modules and scripts as several processes; replicas that drift apart."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from evenstep.launcher.processes import Computed
from tests.process.test_launch import TASK, evenstep, workers_of
from tests.waiting import wait_until

DRIFT = """
def loss(model, batch):
    global calls
    calls += 1
    if calls == 12 and os.environ.get("RANK") == "1":
        with torch.no_grad():
            model.bias += 1e-6
    return F.cross_entropy(model(batch[0]), batch[1])
"""

FUNCTION = """
import sys
import evenstep

def main(rate):
    team = evenstep.join()
    print("hello from rank", team.world.rank)
    total = sum(team.world.gather(team.world.rank + 1))
    if rate < 0 and team.world.rank == 1:
        raise ValueError("a negative rate")
    return {"rank": team.world.rank, "total": total, "rate": rate}

if __name__ == "__main__":
    print(evenstep.launch(main, float(sys.argv[1]), devices=2))
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=100)


def test_a_function_runs_in_several_processes_and_what_each_returns_comes_back() -> None:
    Path("function.py").write_text(FUNCTION)
    done = python("function.py", "0.5")
    assert done.returncode == 0, done.stderr
    *said, returned = done.stdout.splitlines()
    assert said == ["hello from rank 0"]
    assert returned == str([{"rank": rank, "total": 3, "rate": 0.5} for rank in range(2)])
    (logs,) = Path("runs").glob("*-main/logs")
    assert (logs / "rank1.out").read_text() == "hello from rank 1\n"


@pytest.mark.slow
def test_a_process_alone_joins_a_group_of_one_that_what_it_launches_does_not_take_for_its_own() -> None:
    alone = (
        "    import os, torch.utils.data as data\n"
        "    before = dict(os.environ)\n"
        "    team = evenstep.join()\n"
        "    assert before == dict(os.environ)\n"
        "    loader = data.DataLoader(range(8), sampler=data.DistributedSampler(range(8)))\n"
        "    print([batch.ids.tolist() for batch in team.loader(loader, batch=8)], len(loader.sampler))\n"
    )
    Path("function.py").write_text(FUNCTION.replace('"__main__":\n', f'"__main__":\n{alone}'))
    done = python("function.py", "0.5")
    assert done.returncode == 0, done.stderr
    ids, said, returned = done.stdout.splitlines()
    assert ids.endswith(" 8")
    assert sorted(json.loads(ids.removesuffix(" 8"))[0]) == list(range(8))
    assert said == "hello from rank 0"
    assert returned == str([{"rank": rank, "total": 3, "rate": 0.5} for rank in range(2)])


def test_a_function_that_raises_is_explained_with_its_line(folder: Path) -> None:
    Path("function.py").write_text(FUNCTION)
    done = python("function.py", "-1")
    assert done.returncode == 1
    assert "rank 1 failed" in done.stderr
    assert 'function.py:10 in main: raise ValueError("a negative rate")' in done.stderr
    assert workers_of(folder) == []


@pytest.mark.slow
def test_replicas_that_drift_apart_are_named_by_parameter_and_step() -> None:
    Path("my_task.py").write_text(TASK + DRIFT)
    done = evenstep("train", "my_task.py", "--devices", "2", "--epochs", "4", "--name", "drifts")
    assert done.returncode == 1
    report = done.stderr[done.stderr.index("error:") :]
    assert "bias" in report
    assert "step 30" in report
    assert "step 10" in report
    assert "rank 1" in report
    assert "--check-every 0" in report
    assert len(report.splitlines()) <= 15


@pytest.mark.slow
def test_replicas_are_not_compared_where_that_is_switched_off() -> None:
    Path("my_task.py").write_text(TASK + DRIFT)
    done = evenstep("train", "my_task.py", "--devices", "2", "--epochs", "4", "--check-every", "0")
    assert done.returncode == 0, done.stderr


SCRIPT = """
import json, os, sys
import torch.distributed as dist
dist.init_process_group("gloo")
names = sorted(name for name in os.environ if name.startswith(("TORCH", "MASTER", "ROLE", "GROUP", "LOCAL"))
               or name in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS"))
if dist.get_rank() == 0:
    print(json.dumps({"names": names, "arguments": sys.argv[1:], "name": __name__}))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [(), ("--fresh",)], ids=["copied", "fresh"])
def test_a_script_finds_the_environment_that_torchrun_gives(how: tuple[str, ...]) -> None:
    Path("script.py").write_text(SCRIPT)
    theirs = python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py", "--lr", "0.1")
    ours = evenstep("run", "--devices", "2", *how, "script.py", "--lr", "0.1")
    assert theirs.returncode == ours.returncode == 0, (theirs.stderr, ours.stderr)
    assert json.loads(ours.stdout.splitlines()[-1]) == json.loads(theirs.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_module_runs_as_python_m_would_and_its_exit_code_is_told(folder: Path) -> None:
    Path("package").mkdir()
    Path("package/__init__.py").touch()
    Path("package/program.py").write_text("import sys\nprint(sys.argv[1:], __name__)\nsys.exit(int(sys.argv[1]))\n")
    done = evenstep("run", "-m", "package.program", "0", "--more")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['0', '--more'] __main__\n"
    failed = evenstep("run", "-m", "package.program", "3")
    assert failed.returncode == 1
    assert "rank 0 exited with code 3" in failed.stderr
    assert workers_of(folder) == []


@pytest.mark.slow
def test_threads_of_a_script_are_waited_for() -> None:
    Path("script.py").write_text(
        "import time\nfrom concurrent.futures import ThreadPoolExecutor\n"
        "def save():\n    time.sleep(0.5)\n    open('saved', 'w').close()\n"
        "ThreadPoolExecutor().submit(save)\n"
    )
    assert evenstep("run", "script.py").returncode == 0
    assert Path("saved").exists()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single", "dp"])
def test_a_task_of_this_process_alone_is_restarted_too(strategy: str) -> None:
    Path("script.py").write_text(
        TASK.replace(
            "def fail():", "def fail():\n    if not os.path.exists('failed'):\n        open('failed', 'w').close()"
        ).replace('    kind = os.environ["FAIL_KIND"]', "        os.kill(os.getpid(), signal.SIGKILL)\n    kind = ''")
        + f"""
import evenstep
devices = 1 if "{strategy}" == "single" else 2
record = evenstep.train(task(), strategy="{strategy}", devices=devices, restarts=1, checkpoint_every=2, progress=False)
print(record.summary.steps, len(record.restarts))
"""
    )
    done = python("script.py", FAIL_RANK="0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["20", "1"]


IMPATIENT = (
    "import evenstep.launcher.hang as stall\nstall.FIRST_SECONDS = 2.0\nfrom evenstep.__main__ import main\nmain()"
)
"""The command, with two seconds for ten minutes."""


def test_a_process_that_wakes_now_and_then_has_not_computed() -> None:
    """As gloo's threads do while they wait: a deadlock in torch's destructors was taken for work."""
    waits, works = "time.sleep(0.01)", "pass"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", f"import time\nprint(1, flush=True)\nwhile True: {loop}"], stdout=subprocess.PIPE
        )
        for loop in (waits, works)
    ]
    idle, busy = started
    computed = Computed()
    try:
        for one in started:
            assert one.stdout is not None
            one.stdout.readline()
        before = [computed.seconds(one.pid) for one in started]
        wait_until(lambda: computed.seconds(busy.pid) > before[1] + 0.5)
        assert computed.seconds(idle.pid) == before[0]
    finally:
        for one in started:
            one.kill()
            one.communicate()


@pytest.mark.slow
def test_a_script_that_waits_without_computing_is_explained_and_left_alone() -> None:
    Path("script.py").write_text("import time\ntime.sleep(5)\nprint('done')\n")
    done = python("-c", IMPATIENT, "run", "script.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"
    assert "rank 0 was last seen script.py:2" in done.stderr
    assert "it keeps running" in done.stderr
    asked = evenstep("run", "--stall-after", "2", "script.py")
    assert asked.returncode == 124


@pytest.mark.slow
def test_a_rank_that_does_not_exit_after_its_script_is_named_and_ended_when_the_others_have_gone() -> None:
    Path("script.py").write_text(
        "import os, threading, time\n"
        "if os.environ['RANK'] == '1':\n    threading.Thread(target=time.sleep, args=(20,)).start()\n"
        "print('done')\n"
    )
    done = python("-c", IMPATIENT, "run", "--devices", "2", "script.py")
    assert done.returncode == 124, done.stderr
    assert done.stdout == "done\n"
    assert re.search(r"rank 1 was last seen exiting, \S*threading.py:\d+ in \w+; rank 0 has ended", done.stderr)


@pytest.mark.slow
def test_a_hang_is_seen_after_the_run_folder_was_deleted() -> None:
    Path("script.py").write_text("import shutil, time\nshutil.rmtree('runs')\ntime.sleep(20)\n")
    done = evenstep("run", "--stall-after", "2", "script.py")
    assert done.returncode == 124, done.stderr
    assert "rank 0 was last seen script.py:3 in <module>" in done.stderr


@pytest.mark.slow
def test_a_script_that_calls_train_without_a_guard_gets_an_error_and_no_traceback() -> None:
    Path("script.py").write_text(
        "import torch, evenstep\n"
        "def task() -> evenstep.Task:\n"
        "    return evenstep.Task(\n"
        "        model=lambda: torch.nn.Linear(2, 1), train=(torch.ones(8, 2),), batch=4,\n"
        "        loss=lambda model, batch: model(batch[0]).mean(),\n"
        "        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),\n"
        "    )\n"
        "evenstep.train(task, devices=2, progress=False)\n"
    )
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {Path('script.py').resolve()}:8 calls evenstep.train, and each worker")
    assert done.stderr.endswith('if __name__ == "__main__": evenstep.train(...)\n')
    assert "Traceback" not in done.stderr
