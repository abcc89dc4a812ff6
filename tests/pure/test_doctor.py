"""What the doctor makes of what it sees: limits, variables, trials, and other machines."""

from __future__ import annotations

import itertools
import math
import resource
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from evenstep.distributed import devices
from evenstep.distributed.cgroups import Groups
from evenstep.doctor import Check, Finding, Status, network, worst
from evenstep.doctor.bandwidth import expected_sum, pattern, rounds, schedule
from evenstep.doctor.checks import CheckStarted, MachineChecks, Report
from evenstep.doctor.cluster import (
    BadMessage,
    ClusterCheck,
    MachineChannel,
    MachineFacts,
    MachineReport,
    SideEnded,
    both,
    compare,
    not_understood,
)
from evenstep.doctor.environment import back_ends, missing_interfaces, torch_build, variables
from evenstep.doctor.gpus import driver, judge_gpu, unequal
from evenstep.doctor.limits import cores, memory, open_files, shared_memory, threads
from evenstep.doctor.network import host_name, measure_loopback, ports, resolve
from evenstep.doctor.remedies import (
    LEAST_SECONDS,
    Reference,
    TimeBudget,
    Trial,
    in_words,
    is_sound,
    judge,
    rate_in_words,
    remedies,
    search,
)
from evenstep.doctor.sandbox import Ended, shortened
from evenstep.launcher.rendezvous.addresses import open_store
from evenstep.launcher.rendezvous.auth import MessageSigner
from evenstep.launcher.rendezvous.rank_assignment import RankAssignment
from tests.pure.conftest import Ended as Finished


def group(folder: Path, membership: str, **files: str) -> Groups:
    """Control groups as Linux shows them; `a__b` is the file b in the folder a."""
    (folder / "membership").write_text(membership)
    for name, text in files.items():
        path = folder / "root" / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Groups(folder / "membership", folder / "root")


def well(seconds: float = 0.05, is_right: bool = True, latency: float = 1e-4) -> Ended:
    rows = [
        {"num_bytes": num, "is_right": is_right, "median_seconds": one, "best_seconds": one}
        for num, one in ((2**12, latency), (2**26, seconds))
    ]
    return Ended(({"rows": rows, "copy_bytes_per_second": 5e9},) * 2)


def test_reads_the_quota_of_both_versions_of_control_groups_and_of_those_above(tmp_path: Path) -> None:
    for number, (membership, files, expected) in enumerate(
        (
            ("0::/mine\n", {"mine__cpu_dot_max": "150000 100000"}, 1.5),
            ("0::/a/b\n", {"a__cpu_dot_max": "50000 100000", "a__b__cpu_dot_max": "max 100000"}, 0.5),
            ("0::/\n", {"cpu_dot_max": "max 100000"}, None),
            ("4:cpu,cpuacct:/d\n", {"cpu,cpuacct__d__cpu.cfs_quota_us": "-1"}, None),
            # In a container: the path is the host's, the limit is at the root.
            ("1:cpu:/docker/x\n", {"cpu__cpu.cfs_quota_us": "200000", "cpu__cpu.cfs_period_us": "100000"}, 2.0),
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert group(folder, membership, **files).cpu_quota() == expected, membership


def test_reads_the_tightest_limit_of_memory(tmp_path: Path) -> None:
    files = {"a__memory_dot_max": "4000", "a__memory_dot_current": "1000", "a__b__memory_dot_max": "max"}
    assert group(tmp_path, "0::/a/b\n", **files).memory_limit() == (4000, 1000)
    first = {"memory__memory.limit_in_bytes": "9223372036854771712", "memory__memory.usage_in_bytes": "5"}
    assert group(tmp_path, "3:memory:/\n", **first).memory_limit() is None


def test_files_that_are_kept_for_later_do_not_count_as_used(tmp_path: Path) -> None:
    second = {
        "memory_dot_max": "4000",
        "memory_dot_current": "3900",
        "memory_dot_stat": "anon 900\ninactive_file 2900\n",
    }
    assert group(tmp_path, "0::/\n", **second).memory_limit() == (4000, 1000)
    first = {"memory__memory.limit_in_bytes": "4000", "memory__memory.usage_in_bytes": "3900"}
    # The group's own line is beside that of the whole tree, which is what the limit holds for.
    first["memory__memory.stat"] = "inactive_file 7\ntotal_inactive_file 2900\n"
    assert group(tmp_path, "3:memory:/\n", **first).memory_limit() == (4000, 1000)


@pytest.mark.parametrize(("quota", "num"), [(None, 4), (0.5, 1), (1.0, 1), (2.5, 3), (64.0, 4), (0.0, 1)])
def test_a_training_shares_out_the_cores_that_affinity_and_the_quota_allow(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, num: int
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(devices, "cores_by_affinity", lambda: 4)
    monkeypatch.setattr(devices, "own_quota", lambda: quota)
    assert devices.num_cores() == num
    assert devices.share_threads(None, ["cpu", "cpu"]) == max(1, num // 2)


def test_a_small_quota_is_warned_of_and_counts_as_the_cores(tmp_path: Path) -> None:
    groups = group(tmp_path, "0::/\n", cpu_dot_max="50000 100000")
    found = cores(groups)
    assert (found.status, found.numbers["cores"]) == ("warn", 1)
    assert "OMP_NUM_THREADS=1" in found.advice


def test_a_nearly_full_control_group_is_bad_and_names_the_limit(tmp_path: Path) -> None:
    full = group(tmp_path, "0::/\n", memory_dot_max=str(2**29), memory_dot_current=str(2**29 - 2**20))
    found = memory(full)
    assert (found.status, found.numbers["free_bytes"]) == ("bad", 2**20)
    assert "cgroup" in found.said
    assert "larger limit" in found.advice


@pytest.mark.parametrize(
    ("given", "status"), [("", "good"), ("1", "good"), ("1000", "warn"), ("many", "warn"), ("0", "warn")]
)
def test_judges_the_number_of_threads(given: str, status: str) -> None:
    assert threads({"OMP_NUM_THREADS": given} if given else {}).status == status


def test_shared_memory_that_cannot_be_written_is_bad(tmp_path: Path) -> None:
    found = shared_memory(tmp_path / "missing")
    assert found.status == "bad"
    assert "--shm-size" in found.advice
    assert shared_memory(tmp_path).numbers["shared_bytes"]


@pytest.mark.parametrize(
    ("soft", "hard", "status", "advice"),
    [
        (100, 4096, "bad", "ulimit -n 4096"),
        (256, resource.RLIM_INFINITY, "warn", "ulimit -n 65536"),
        (256, 256, "warn", "ask for more"),
        (1024, 1024, "good", ""),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, "good", ""),
    ],
)
def test_few_open_files_are_a_finding_with_what_may_be_asked_for(
    soft: int, hard: int, status: str, advice: str
) -> None:
    found = open_files((soft, hard))
    assert (found.status, found.numbers["files"]) == (status, None if soft == resource.RLIM_INFINITY else soft)
    assert found.advice.startswith(advice)
    assert bool(found.advice) == bool(advice)


def test_the_open_files_of_this_process_are_what_its_limit_says() -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert open_files().numbers["files"] == (None if soft == resource.RLIM_INFINITY else soft)


def test_a_cpu_torch_on_a_machine_with_gpus_is_bad(tmp_path: Path) -> None:
    assert torch_build(0, tmp_path).status == "good"
    (tmp_path / "nvidia0").touch()
    (tmp_path / "nvidiactl").touch()
    if torch.version.cuda is None:
        assert "1 NVIDIA GPU cannot be used" in torch_build(0, tmp_path).advice
    assert back_ends(0).numbers["gloo"] is True


def test_the_machine_hears_itself_and_holds_a_store() -> None:
    assert measure_loopback().bytes_per_second > 0
    assert ports().status == "good"


def listening(port: int) -> list[str]:
    sockets = psutil.Process().net_connections()
    return [one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN and one.laddr.port == port]


@pytest.mark.parametrize("fails_first", [False, True])
def test_the_store_that_looks_at_ports_listens_to_this_machine_alone(
    monkeypatch: pytest.MonkeyPatch, fails_first: bool
) -> None:
    listening_on: list[list[str]] = []

    def opening(use_libuv: bool, seconds: float) -> TCPStore:
        if use_libuv and fails_first:
            raise OSError("no libuv")
        store = open_store(seconds=seconds, use_libuv=use_libuv)
        listening_on.append(listening(store.port))
        return store

    monkeypatch.setattr(network, "open_store", opening)
    assert ports().advice == ("set USE_LIBUV=0 (found by trying)" if fails_first else "")
    assert listening_on == [["127.0.0.1"]]


class Driver:
    """NVIDIA's library on a machine with two cards."""

    nvmlSystemGetDriverVersion = staticmethod(lambda: "570.1")
    nvmlSystemGetCudaDriverVersion_v2 = staticmethod(lambda: 99080)
    nvmlDeviceGetCount = staticmethod(lambda: 2)


def test_gpus_that_torch_does_not_see_are_bad_unless_the_user_hid_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenstep.doctor.gpus.num_gpus", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert [one.status for one in driver(Driver(), {})] == ["bad"]
    assert [one.status for one in driver(Driver(), {"CUDA_VISIBLE_DEVICES": ""})] == ["good"]


def test_a_name_that_leads_nowhere_is_a_warning_with_the_line_to_add() -> None:
    found = host_name("no-such-name.invalid")
    assert found.status == "warn"
    assert "127.0.1.1 no-such-name.invalid" in found.advice
    assert resolve("localhost", 4)


def test_each_variable_is_judged_and_the_rest_is_listed() -> None:
    found = {
        one.name: one
        for one in variables(
            {
                "GLOO_SOCKET_IFNAME": "nonsense",
                "NCCL_P2P_DISABLE": "1",
                "NCCL_IB_DISABLE": "0",
                "CUDA_LAUNCH_BLOCKING": "1",
                "TORCH_DISTRIBUTED_DEBUG": "detail",
                "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
                "NCCL_DEBUG": "WARN",
                "EVENSTEP_TOKEN": "hidden-value",
                "NCCL_TOPO_FILE": "x" * 500,
                "WORLD_SIZE": "4",
                "RANK": "1",
                "HOME": "/root",
            }
        )
    }
    assert {name: one.status for name, one in found.items()} == {
        "CUDA_LAUNCH_BLOCKING": "warn",
        "GLOO_SOCKET_IFNAME": "bad",
        "NCCL_P2P_DISABLE": "warn",
        "TORCH_DISTRIBUTED_DEBUG": "warn",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "warn",
        "ranks": "warn",
        "environment": "good",
    }
    assert found["ranks"].advice == "unset RANK WORLD_SIZE"
    assert "NCCL_DEBUG=WARN" in found["environment"].said
    assert "hidden-value" not in str([one.to_json() for one in found.values()])
    assert "HOME" not in found["environment"].said


def test_nothing_set_is_good() -> None:
    assert [(one.status, one.said) for one in variables({"HOME": "/"})] == [
        ("good", "no variable is set that changes a run")
    ]


@pytest.mark.parametrize(
    ("text", "is_nccl", "missing"),
    [
        ("lo", False, []),
        ("lo,eth9", False, ["eth9"]),
        ("et", False, ["et"]),
        ("et", True, []),
        ("=et", True, ["et"]),
        ("^docker", True, []),
        ("ib,lo", True, ["ib"]),
        ("", False, []),
    ],
)
def test_reads_lists_of_interfaces_as_gloo_and_nccl_do(text: str, is_nccl: bool, missing: list[str]) -> None:
    assert missing_interfaces(text, {"lo", "eth0"}, is_nccl) == missing


@pytest.mark.parametrize("num", range(2, 10))
def test_everyone_meets_everyone_once_and_nobody_twice_in_a_round(num: int) -> None:
    found = rounds(num)
    assert sorted(itertools.chain.from_iterable(found)) == list(itertools.combinations(range(num), 2))
    for one in found:
        players = list(itertools.chain.from_iterable(one))
        assert len(players) == len(set(players))


@pytest.mark.parametrize("num", range(9))
def test_every_pair_of_gpus_is_tried_once_and_neighbours_are_measured(num: int) -> None:
    pairs = list(itertools.chain.from_iterable(schedule(num)))
    gpus = [pair for pair in pairs if len(set(pair.devices)) == 2]
    wanted = {(f"cuda:{a}", f"cuda:{b}") for a, b in itertools.combinations(range(num), 2)}
    assert {pair.devices for pair in gpus} == wanted
    assert len(gpus) == len(wanted)
    assert all(len(pair.sizes) > 1 for pair in gpus if int(pair.devices[1][5:]) - int(pair.devices[0][5:]) == 1)
    assert pairs[0].name == "2 x cpu, gloo"
    assert len(schedule(num)) <= 12


def test_sums_are_whole_numbers_that_one_wrong_place_gives_away() -> None:
    total = sum(pattern(2**14, rank, torch.device("cpu")) for rank in range(3))
    assert isinstance(total, torch.Tensor)
    assert torch.equal(total, expected_sum(2**14, 3))
    total[77] += 1
    assert not torch.equal(total, expected_sum(2**14, 3))


def test_sums_of_sums_are_exact_for_two_ranks_however_often_they_are_added_up() -> None:
    first, second = (pattern(2**14, rank, torch.device("cpu")) for rank in range(2))
    for _ in range(52):
        first = second = first + second
    assert torch.equal(first, expected_sum(2**14, 2, 52))
    assert torch.isfinite(first).all()
    # The last place of the last of them is seen.
    first[5] = torch.nextafter(first[5], torch.tensor(math.inf))
    assert not torch.equal(first, expected_sum(2**14, 2, 52))
    assert torch.equal(pattern(2**14, 0, torch.device("cpu")), expected_sum(2**14, 1, 52))


def test_a_fast_pair_is_good_a_slow_one_is_warned_of_a_wrong_one_is_bad() -> None:
    beside = Reference("a plain socket: 2.0 GB/s", 2e9)
    fast = judge(Trial("pair", well()), beside)
    assert fast.status == "good"
    assert "64 MiB at 1.3 GB/s (a plain socket: 2.0 GB/s), latency 100 us" in fast.said
    assert judge(Trial("pair", well(seconds=5)), beside).status == "warn"
    assert judge(Trial("pair", well(latency=0.1)), beside).status == "warn"
    wrong = judge(Trial("pair", well(is_right=False)), beside)
    assert wrong.status == "bad"
    assert "the sum of 4 KiB is WRONG" in wrong.said


def test_tries_one_remedy_after_the_other_until_one_helps() -> None:
    asked: list[object] = []

    def attempt(settings: object) -> Ended:
        asked.append(settings)
        return well() if settings == {"NCCL_P2P_DISABLE": "1"} else Ended(why="no")

    failed = Trial("pair", Ended(why="unhandled system error"))
    trial = search(failed, remedies("nccl", ["NCCL_ALGO", "HOME"]), attempt, TimeBudget())
    assert asked == [{"NCCL_ALGO": None}, {"NCCL_P2P_DISABLE": "1"}]
    found = judge(trial, Reference())
    assert found.status == "bad"
    assert found.advice.startswith("export NCCL_P2P_DISABLE=1   (found by trying")


def test_wrong_sums_are_cured_too_and_what_there_was_no_time_for_is_named() -> None:
    wrong = Trial("pair", well(is_right=False))
    assert search(wrong, [{"A": "1"}], lambda _: well(), TimeBudget()).helped_by == {"A": "1"}
    late = search(wrong, [{"A": "1"}, {"B": None}], lambda _: Ended(why="no"), TimeBudget(0))
    assert judge(late, Reference()).advice == "no time was left to try: export A=1, unset B"
    assert in_words({"A": "1"}) == "export A=1"


def test_what_hangs_leaves_no_time_for_other_pairs_and_that_is_said_of_them() -> None:
    over = TimeBudget(deadline=time.monotonic() + LEAST_SECONDS - 1)
    assert over.allowed(20) == 0
    assert search(Trial("pair", Ended(why="no")), [{"A": "1"}], lambda _: well(), over).not_tried == ({"A": "1"},)
    check = MachineChecks({}, over).checks()[-1]
    (found,) = check.findings()
    assert (found.name, found.status) == ("2 x cpu, gloo", "warn")
    assert found.said.startswith("not tried")
    assert 18 < TimeBudget(deadline=time.monotonic() + 20).allowed(50) <= 20
    assert TimeBudget().allowed(20) == 20


def test_what_nccl_says_last_is_what_is_said() -> None:
    text = (
        "DistBackendError: NCCL error in: x.cpp:94, unhandled\nncclSystemError: call failed\nLast error:\nno interface"
    )
    assert shortened(text) == "no interface"
    assert shortened("RuntimeError: [enforce fail at /a/b.cc:84] ifa != nullptr. Unable to find x") == (
        "RuntimeError: Unable to find x"
    )
    assert shortened("") == "no reason given"


def test_a_gpu_that_others_fill_is_warned_of_by_their_processes() -> None:
    facts = {"name": "A", "uuid": "u", "free_bytes": 2**30, "memory_bytes": 2**36, "is_right": True}
    facts |= {"copy_bytes_per_second": 1e12, "host_bytes_per_second": 2e10}
    found = judge_gpu("cuda:0", facts, ["process 7 (60.00 GiB)"])
    assert found.status == "warn"
    assert "process 7" in found.advice
    assert judge_gpu("cuda:0", {**facts, "free_bytes": 2**36}, []).status == "good"
    assert judge_gpu("cuda:0", {**facts, "is_right": False}, []).status == "bad"


def test_shares_are_proposed_for_different_gpus() -> None:
    found = [Finding(f"cuda:{index}", "good", "", numbers={"name": name}) for index, name in enumerate("AAB")]
    assert unequal(found[:2]) == []
    (one,) = unequal(found)
    assert one.said == "different: 2 x A, 1 x B"
    assert "--shares auto" in one.advice


def test_a_check_that_fails_is_a_finding_itself() -> None:
    def look() -> list[Finding]:
        raise ValueError("a strange machine")

    (found,) = Check("odd", look).findings()
    assert (found.status, found.said) == ("warn", "could not be checked: ValueError: a strange machine")
    # Where nothing can be tried out, nothing can be trained.
    (found,) = Check("odd", look, is_trial=True).findings()
    assert (found.status, found.said) == ("bad", "could not be tried: ValueError: a strange machine")
    assert "ulimit -a" in found.advice
    assert worst([found, Finding("b", "bad", "")]) == "bad"
    assert worst([]) == "good"


def member(name: str, **more: object) -> MachineFacts:
    usual = {"torch": "2.13.0", "evenstep": "0.1.0", "python": "3.11.7", "gpus": 0, "interface": "eth0"}
    usual |= {"interface_bits_per_second": 1e10, "clock_seconds": 100.0, "set_names": ""}
    return msgspec.convert({"name": name, **usual, **more}, MachineFacts)


def test_versions_and_clocks_that_differ_are_findings() -> None:
    assert {one.status for one in compare([member("a"), member("b", python="3.11.2"), None])} == {"good"}
    torch_found, _, _, clocks = compare([member("a"), member("b", torch="2.11.0", clock_seconds=93.0)])
    assert (torch_found.status, torch_found.said) == ("warn", "a 2.13.0, b 2.11.0")
    assert (clocks.status, clocks.said) == ("warn", "7.0 s apart")
    assert clocks.numbers == {"a": 0.0, "b": 7.0}
    assert "b's clock" in clocks.advice


def test_a_failure_explains_an_attempt_better_than_a_timeout() -> None:
    late, failed = SideEnded("no result", True, []), SideEnded("no such interface", False, [])
    good = msgspec.convert(ENDED, SideEnded)
    assert both(late, failed) == both(failed, late) == Ended(why="no such interface")
    assert both(good, late).why
    assert len(both(good, good).returned) == 2
    assert both(good, SideEnded("", False, [])).why == "a machine sent no result"


class Pad:
    """A store for machines that are one process."""

    def __init__(self) -> None:
        self.texts: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.texts[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.texts[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.texts for key in keys)


def channel(pad: Pad, machine: int, key: bytes = b"ours", is_lost: bool = False) -> MachineChannel:
    return MachineChannel(pad, machine, 2, MessageSigner(key), lambda: is_lost)  # type: ignore[arg-type]


def test_machines_exchange_values_and_do_not_wait_for_one_that_is_lost() -> None:
    pad = Pad()
    first, second = channel(pad, 0), channel(pad, 1, is_lost=True)
    assert second.exchange("a", {"b": 2}, dict, [0, 1]) == [None, {"b": 2}]
    assert first.exchange("a", {"b": 1}, dict, [0, 1]) == [{"b": 1}, {"b": 2}]
    assert first.receive("missing", dict, 0.01) is None


def test_messages_of_a_stranger_and_moved_ones_are_refused() -> None:
    pad = Pad()
    first = channel(pad, 0)
    channel(pad, 1, b"theirs").send("report", {"own": [], "pairs": []})
    first.send("old", {"own": [], "pairs": []})
    pad.texts["doctor/moved"] = pad.texts["doctor/old"]
    pad.set("doctor/plain", '{"own": [], "pairs": []}')
    for key in ("report", "moved", "plain"):
        with pytest.raises(BadMessage, match="unauthorized process"):
            first.receive(key, MachineReport)
    assert first.receive("old", MachineReport) == MachineReport([], [])


ROW = {"num_bytes": 4096, "is_right": True, "median_seconds": 1e-4, "best_seconds": 1e-4}
ENDED = {"returned": [{"rows": [ROW], "copy_bytes_per_second": 5e9}], "why": "", "is_late": False}


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (MachineReport, {}),
        (MachineReport, {"own": 5, "pairs": []}),
        (MachineReport, {"own": [{"name": "a"}], "pairs": []}),
        (MachineReport, {"own": [{"name": "a", "status": "splendid", "said": ""}], "pairs": []}),
        (MachineReport, {"own": [], "pairs": ["text"]}),
        (SideEnded, {**ENDED, "returned": [{"rows": [], "copy_bytes_per_second": 1}]}),
        (SideEnded, {**ENDED, "returned": [{"rows": [{**ROW, "best_seconds": 0}], "copy_bytes_per_second": 1}]}),
        (SideEnded, {**ENDED, "returned": [{"rows": [{**ROW, "num_bytes": math.inf}], "copy_bytes_per_second": 1}]}),
        (SideEnded, {**ENDED, "returned": [{"rows": [ROW], "copy_bytes_per_second": math.nan}]}),
        (MachineFacts, {"name": "a"}),
        (MachineFacts, []),
    ],
)
def test_a_message_of_another_type_is_a_bad_finding(kind: type[Any], values: Any) -> None:
    pad = Pad()
    pad.set("doctor/a", MessageSigner(b"ours").sign("doctor/a", values))
    with pytest.raises(BadMessage, match="not understood here") as raised:
        channel(pad, 0).receive("a", kind)
    found = not_understood("machine 2", raised.value)
    assert found.status == "bad"
    assert "EVENSTEP_TOKEN" in found.advice


def test_a_check_that_a_stranger_disturbs_ends_with_a_bad_finding() -> None:
    pad, own = Pad(), Finding("python", "good", "")
    pad.set("doctor/ready/1", "{}")
    first = ClusterCheck(channel(pad, 0), RankAssignment(0, 2, 0, 2), {}).findings([own])
    assert [(one.name, one.status) for one in first] == [("python", "good"), ("other machines", "bad")]
    pad.set("doctor/ready/0", "{}")
    (second,) = ClusterCheck(channel(pad, 1, is_lost=True), RankAssignment(1, 2, 1, 2), {}).findings([own])
    assert second.status == "bad"
    assert "unauthorized process" in second.said


def test_a_report_that_is_not_understood_is_a_bad_finding_beside_all_others() -> None:
    pad = Pad()
    other = channel(pad, 1, is_lost=True)
    other.send("ready/1", {})
    other.send("member/1", asdict(member("b", clock_seconds=time.time())))
    other.send("report/1", {"findings": "none"})
    # The other machine has left: its messages are read, and no attempt is made.
    check = ClusterCheck(channel(pad, 0, is_lost=True), RankAssignment(0, 2, 0, 2), {})
    found = {one.name: one for one in check.findings([])}
    assert found["b"].status == "bad"
    assert "not understood here" in found["b"].said
    assert found["clocks"].status == "good"
    (verdict,) = ClusterCheck(other, RankAssignment(1, 2, 1, 2), {}).findings([])
    assert (verdict.status, verdict.said) == ("bad", "the first machine prints what was found")


def test_what_another_machine_measured_is_judged_like_its_own() -> None:
    ended = msgspec.convert(ENDED, SideEnded)
    assert judge(Trial("pair", both(ended, ended)), Reference()).status == "good"
    wrong = {**ENDED, "returned": [{"rows": [{**ROW, "is_right": False}], "copy_bytes_per_second": 1}]}
    assert not is_sound(both(ended, msgspec.convert(wrong, SideEnded)))


def test_rates_are_said_in_units_that_people_read() -> None:
    assert [rate_in_words(rate) for rate in (2.5e6, 8e8, 1.5e9, 4e11)] == [
        "2.5 MB/s",
        "800 MB/s",
        "1.5 GB/s",
        "400 GB/s",
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--machines", "2"], "--machines and --rendezvous go together"),
        (["--machines", "none", "--rendezvous", "head:1"], "machines is 'none'; write a number such as 2"),
        (["--machines", "2", "--rendezvous", "head"], "rendezvous is 'head'; write the first machine"),
        (["--quick"], "No such option: --quick"),
        (["now"], "unexpected extra argument"),
    ],
)
def test_bad_input_is_refused_before_anything_is_started(
    evenstep: Callable[..., Finished], arguments: list[str], said: str
) -> None:
    ended = evenstep("doctor", *arguments)
    assert ended.code == 2
    assert said in ended.err.replace("\n", " ")


@pytest.mark.parametrize(("status", "code"), [("good", 0), ("warn", 0), ("bad", 1)])
def test_the_exit_code_is_1_if_something_is_bad_and_0_if_not(
    evenstep: Callable[..., Finished], monkeypatch: pytest.MonkeyPatch, status: Status, code: int
) -> None:
    def examine(_: object) -> Iterator[CheckStarted | Report]:
        yield Report((Finding("a", "good", "fine"), Finding("b", status, "so")), 1.0)

    monkeypatch.setattr("evenstep.launcher.fork_server.start_server", lambda: None)
    monkeypatch.setattr("evenstep.doctor.checks.examine", examine)
    assert evenstep("doctor").code == code


def test_help_has_examples(evenstep: Callable[..., Finished]) -> None:
    assert "evenstep doctor --machines 2 --rendezvous node0:29400" in evenstep("doctor", "--help").out


def test_the_name_of_this_machine_is_looked_at() -> None:
    assert socket.gethostname() in host_name().said
