"""Running a suite: each round once, systems in turns, results kept; missing and failed rounds."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from bench.cluster.virtual_cluster import VirtualCluster
from bench.errors import BenchError
from bench.evaluation.host_selection import HostSelection, this_host
from bench.evaluation.outcome import FILE, EvaluationOutcome, Journal
from bench.evaluation.run import Evaluation, setting_of
from bench.evaluation.suite import Group, Suite
from bench.hosts import links
from bench.hosts.hosts import ThisHost
from bench.hosts.real_hosts import RealHosts
from bench.rounds.record import Case, Round, Task
from bench_rounds import finished

HERE = this_host(note="not root")
SUITE = Suite("mine", "Mine", (Group(Task("digits", 8), "loopback", 2, ("a", "b"), rounds=2),))


class Systems:
    """Stands in for `run_round`: records the requested rounds, and fails where it is told to."""

    def __init__(self, stop_at: int = -1, fails: tuple[str, ...] = ()) -> None:
        self.asked: list[tuple[str, int]] = []
        self.stop_at, self.fails = stop_at, fails

    def __call__(self, case: Case, number: int, hosts: object, timeout_s: float) -> Round:
        if len(self.asked) == self.stop_at:
            raise KeyboardInterrupt
        self.asked.append((case.system, number))
        if case.system in self.fails:
            raise RuntimeError(f"{case.system} is broken")
        return finished(case, 1.0, 2.0, 3.0, number=number)


def run(
    folder: Path, systems: Systems, suite: Suite = SUITE, **missing: str
) -> tuple[EvaluationOutcome, str]:
    with contextlib.redirect_stderr(io.StringIO()) as out:
        return Evaluation(suite, HERE, systems, missing).run(folder), out.getvalue()


ALL = [("a", 0), ("b", 0), ("b", 1), ("a", 1)]


def test_every_round_is_run_and_kept(tmp_path: Path) -> None:
    systems = Systems()
    outcome, said = run(tmp_path, systems)
    assert systems.asked == ALL
    assert [(each.case.system, each.number) for each in outcome.rounds] == ALL
    assert outcome.setting.notes == ("not root",)
    assert "[4 rounds left] digits-64/8/loopback-2/weak/a, round 1 of 2\n" in said
    assert "digits-64/8/loopback-2/weak/a: step 2.5 s" in said
    assert EvaluationOutcome.read(tmp_path) == outcome


@pytest.mark.parametrize("stop_at", [0, 1, 2, 3])
def test_an_interrupted_run_resumes_without_losing_or_repeating_a_round(stop_at: int, tmp_path: Path) -> None:
    first, second = Systems(stop_at), Systems()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, first)
    outcome, _ = run(tmp_path, second)
    assert first.asked + second.asked == ALL
    assert [(each.case.system, each.number) for each in outcome.rounds] == ALL


def test_a_cluster_is_not_brought_up_for_cases_that_failed_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, Systems(stop_at=2, fails=("a", "b")))
    monkeypatch.setattr(ThisHost, "__enter__", lambda self: pytest.fail("it was"))
    run(tmp_path, Systems())


def test_a_crash_is_recorded_with_its_output_and_not_tried_again(tmp_path: Path) -> None:
    systems = Systems(fails=("b",))
    outcome, said = run(tmp_path, systems)
    assert systems.asked == [("a", 0), ("b", 0), ("a", 1)]
    (failed,) = [each for each in outcome.rounds if each.error]
    assert failed.case.system == "b"
    assert "Traceback" in failed.error
    assert "RuntimeError: b is broken" in failed.error
    assert "failed, RuntimeError: b is broken" in said
    again = Systems()
    run(tmp_path, again)
    assert again.asked == []


def test_a_missing_system_is_skipped_by_name_and_run_once_installed(tmp_path: Path) -> None:
    systems = Systems()
    for _ in range(2):
        outcome, said = run(tmp_path, systems, b="Horovod is not installed")
        assert "b: skipped, Horovod is not installed" in said
    assert systems.asked == [("a", 0), ("a", 1)]
    (skipped,) = [each for each in outcome.rounds if each.skipped]
    assert (skipped.case.system, skipped.ok) == ("b", False)
    run(tmp_path, systems)
    assert systems.asked[2:] == [("b", 0), ("b", 1)]


def broken(self: ThisHost) -> None:
    raise BenchError("no such rate")


def test_a_cluster_that_does_not_come_up_is_not_blamed_on_systems_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        with monkeypatch.context() as patched:
            patched.setattr(ThisHost, "__enter__", broken)
            outcome, said = run(tmp_path, Systems())
        assert [(each.case.system, each.number) for each in outcome.rounds] == ALL
        assert {each.skipped for each in outcome.rounds} == {"the hosts were not up: no such rate"}
        assert all(each.not_up and not each.error for each in outcome.rounds)
        assert "not run, the hosts were not up: no such rate" in said
    systems = Systems()
    outcome, _ = run(tmp_path, systems)
    assert systems.asked == ALL
    assert all(each.ok for each in outcome.rounds)
    assert EvaluationOutcome.read(tmp_path) == outcome


def test_a_cluster_that_cannot_be_taken_down_does_not_undo_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stays(self: ThisHost, *_: object) -> None:
        raise BenchError("busy cgroup")

    monkeypatch.setattr(ThisHost, "__exit__", stays)
    outcome, said = run(tmp_path, Systems())
    assert all(each.ok for each in outcome.rounds)
    assert "measured; its hosts could not be ended: busy cgroup" in said
    assert "not run" not in said


def test_failed_rounds_run_again_on_request(tmp_path: Path) -> None:
    run(tmp_path, Systems(fails=("b",)))
    systems = Systems()
    evaluated = Evaluation(SUITE, HERE, systems, {})
    outcome = evaluated.run(tmp_path, retry_failed=True)
    assert systems.asked == [("b", 0), ("b", 1)]
    assert [(each.case.system, each.number) for each in outcome.rounds if each.ok] == [
        *(("a", 0), ("b", 0), ("a", 1), ("b", 1)),
    ]
    assert not any(each.error for each in outcome.rounds)
    assert EvaluationOutcome.read(tmp_path) == outcome
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_a_line_that_was_cut_off_is_measured_again(tmp_path: Path) -> None:
    run(tmp_path, Systems())
    file = tmp_path / FILE
    file.write_text(file.read_text()[:-20])
    assert len(EvaluationOutcome.read(tmp_path).rounds) == 3
    systems = Systems()
    outcome, _ = run(tmp_path, systems)
    assert systems.asked == [ALL[-1]]
    assert EvaluationOutcome.read(tmp_path) == outcome


def test_a_folder_of_another_plan_is_refused(tmp_path: Path) -> None:
    run(tmp_path, Systems())
    other = replace(SUITE, groups=(replace(SUITE.groups[0], rounds=3),))
    with pytest.raises(BenchError, match=r"with another plan.*Received: plan \w+ of suite 'mine' \(now"):
        run(tmp_path, Systems(), other)


SOFTWARE = {"python": "/usr/bin/python3", "commit": "abc", "tensorflow": "2.18.1"}


@pytest.mark.parametrize(
    ("now", "received"),
    [
        ({"tensorflow": "2.21.0"}, r"tensorflow 2\.18\.1 \(now 2\.21\.0\)"),
        ({"commit": "def"}, r"commit abc \(now def\)"),
        ({"python": "/opt/python3", "commit": "def"}, "python /usr/bin/python3 .*, commit abc "),
    ],
)
def test_a_folder_of_other_software_is_refused(now: dict[str, str], received: str, tmp_path: Path) -> None:
    def of(software: dict[str, str]) -> Evaluation:
        return Evaluation(SUITE, HERE, Systems(), {"a": "absent", "b": "absent"}, software)

    of(SOFTWARE).run(tmp_path)
    of({**SOFTWARE, "horovod": "0.28.1"}).run(tmp_path)  # installed since then
    with pytest.raises(BenchError, match=f"software, .*Received: {received}"):
        of({**SOFTWARE, **now}).run(tmp_path)


def test_a_complete_folder_is_reported(tmp_path: Path) -> None:
    assert "nothing left" not in run(tmp_path, Systems())[1]
    _, said = run(tmp_path, Systems())
    assert f"no round is left to run in {tmp_path}, begun 20" in said


def test_a_folder_of_other_hosts_is_refused(tmp_path: Path) -> None:
    def on(hosts: str) -> Evaluation:
        return Evaluation(
            SUITE, HostSelection(RealHosts(hosts), "hosts"), Systems(), {"a": "absent", "b": "absent"}
        )

    on("a:1,b:1").run(tmp_path)
    on("a:1,b:1").run(tmp_path)
    with pytest.raises(BenchError, match=r"Received: on hosts a:1, b:1 \(now hosts c:2\)"):
        on("c:2").run(tmp_path)


def test_a_folder_in_use_by_another_evaluation_is_refused(tmp_path: Path) -> None:
    with Journal(tmp_path, setting_of(SUITE, HERE)), pytest.raises(BenchError, match="One evaluation at"):
        run(tmp_path, Systems())
    run(tmp_path, Systems())


def test_a_suite_that_cannot_run_here_at_all() -> None:
    short = Group(Task("digits", 800, epochs=1), "slow-cpu", 1, ("a",))
    with pytest.raises(
        BenchError,
        match=r"Received: none, not root; .* is left out: epochs .*more steps than the warm-up's 3",
    ):
        HERE.fit(Suite("mine", "Mine", (short,)))


def test_groups_left_out_are_in_the_plan_and_the_report() -> None:
    elsewhere = replace(SUITE.groups[0], cluster="slow-cpu")
    fitted = HERE.fit(Suite("mine", "Mine", (*SUITE.groups, elsewhere)))
    (said,) = fitted.notes
    assert said == "digits-64/8/slow-cpu-2/weak is left out: another group has its task"
    assert said in Evaluation(fitted, HERE, Systems(), {}).describe()
    assert setting_of(fitted, HERE).notes == ("not root", said)


def test_a_file_that_is_not_a_journal(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("[]")
    with pytest.raises(BenchError, match=rf"{FILE}: Results should be"):
        run(tmp_path, Systems())


def test_files_that_are_not_results(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"can be read. Received: "):
        EvaluationOutcome.read(tmp_path)
    run(tmp_path, Systems())
    whole = (tmp_path / FILE).read_text()
    for text in ("", "[]\n", "{}\n", "5\n", '{"machine":[]}\n', whole + "{\n", whole.replace("3.0", "NaN")):
        (tmp_path / FILE).write_text(text)
        with pytest.raises(BenchError, match=r"results\.jsonl: Results should be .*Received: "):
            EvaluationOutcome.read(tmp_path)


def test_links_that_cannot_be_measured_are_tried_once_for_all_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def fail(hosts: object, first: str, second: str, *, seconds: float) -> None:
        tried.append(second)
        raise subprocess.TimeoutExpired(["iperf3"], 180.0)

    monkeypatch.setattr(VirtualCluster, "up", lambda self: None)
    monkeypatch.setattr(VirtualCluster, "down", lambda self: None)
    monkeypatch.setattr(links, "measure_two_way", fail)
    groups = tuple(Group(Task("digits", batch), "2x1gbit", 2, ("a",)) for batch in (8, 16))
    evaluated = Evaluation(Suite("mine", "Mine", groups), HostSelection(), Systems(), {})
    evaluated.run(tmp_path)
    outcome = evaluated.run(tmp_path)
    assert tried == ["h1"]
    (link,) = outcome.links
    assert (link.second, link.set_bits_per_s, link.two_way_bits_per_s) == ("h1", 1e9, None)
    assert link.why == "Command '['iperf3']' timed out after 180.0 seconds"
    assert EvaluationOutcome.read(tmp_path) == outcome


def test_the_rounds_left_are_told(tmp_path: Path) -> None:
    """Those of `c`, which is missing, and of `b` after it has failed are not left."""
    suite = replace(SUITE, groups=(replace(SUITE.groups[0], systems=("a", "b", "c"), rounds=3),))
    _, said = run(tmp_path, Systems(fails=("b",)), suite, c="absent")
    told = re.findall(r"^\[(.*) rounds left\] \S*/(\w),", said, re.MULTILINE)
    assert told == [("6", "a"), ("5", "b"), ("2", "a"), ("1", "a")]


@pytest.mark.parametrize(
    ("error", "why"),
    [
        ("Traceback:\nValueError: no\n-----\nmpirun: a process ended\n", "ValueError: no"),
        ("tensorflow.errors.Aborted\nkeras.FooError: bad\nExit code: 1", "keras.FooError: bad"),
        ("no end within 300 s\n", "no end within 300 s"),
    ],
)
def test_a_failure_summarised_in_one_line(error: str, why: str) -> None:
    assert Round(Case("a", "b", 2, Task("digits", 8)), 0, error=error).why == why


def test_runs_of_different_cases_are_joined(tmp_path: Path) -> None:
    first, _ = run(tmp_path, Systems())
    task = replace(SUITE.groups[0].task, batch=16)
    rest = Suite("rest", "The rest", (replace(SUITE.groups[0], task=task),))
    second, _ = run(tmp_path / "rest", Systems(), rest)
    both = [*first.setting.plan["groups"], *second.setting.plan["groups"]]
    first = replace(first, setting=replace(first.setting, plan={"groups": both}))  # stopped before the rest
    joined = EvaluationOutcome.joined([first, second])
    assert joined.rounds == first.rounds + second.rounds
    assert joined.setting.title == first.setting.title
    assert joined.setting.plan["groups"] == both
    assert joined.setting.notes == first.setting.notes
    newer = replace(second, setting=replace(second.setting, software={"keras": "3"}))
    assert EvaluationOutcome.joined([first, newer]).setting.notes[-1].endswith("of keras: unknown, 3.")
    assert EvaluationOutcome.joined([first]) == first
    with pytest.raises(BenchError, match=r"in one of the runs. Received: digits-64/8/.*, twice"):
        EvaluationOutcome.joined([first, first])
    other = replace(second, setting=replace(second.setting, machine=replace(second.setting.machine, cores=7)))
    with pytest.raises(BenchError, match=r"one machine and its clusters. Received: .* cores; and .* with 7"):
        EvaluationOutcome.joined([first, other])
