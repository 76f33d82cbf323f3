"""The report: the paper's aggregates, what was really run beside them, and a page in a browser."""

import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import mooss_common as common
import sac_mooss_dmc as dmc

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmark"))
import report
import sweep

DMC = [
    "finger-spin", "cartpole-swingup", "reacher-easy", "cheetah-run", "walker-walk",
    "ball_in_cup-catch"]
PROVENANCE = {
    "command": "python sac_mooss_dmc.py --env-id finger-spin", "commit": "0123456789abcdef",
    "dirty": True, "hardware": "Analytical Engine with 2 cores", "python": "3.11.2",
    "torch": "2.13.0", "numpy": "2.4.6", "gymnasium": "1.2.0", "shimmy": "2.0.0",
    "dm_control": "1.0.31", "mujoco": "3.3.2"}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Nothing here can meet the runs and reports that the user has."""
    monkeypatch.chdir(tmp_path)


def write_run(root, task, name, seed, scores, atari=False, episodes=4, total=100_000, **flags):
    """A run folder; the last episode's return is the highest of an evaluation."""
    folder = root / f"{task}__{name}__s{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    args = {
        "env_id": task, "exp_name": name, "seed": seed, "total_timesteps": total,
        "eval_episodes": episodes, "preset": "paper", **({"multi_step": 10} if atari else {}),
        **({"aux_weight": 0.0} if name == "base" else {}), **flags}
    (folder / "args.json").write_text(json.dumps(args))
    lines = ["step,update,hours,episode,return,length"]
    lines += [f"{step},{step // 4},{step / 1e5},{number},{score + number},250"
              for step, score in scores.items() for number in range(episodes)]
    (folder / "eval.csv").write_text("\n".join(lines) + "\n")
    return folder


def make_report(*paths, out="out"):
    """The text of a report over the folders."""
    words = [*map(str, paths), "--out", str(out), "--bootstrap", "50"]
    assert report.main(words) == 0
    return (Path(out) / "report.md").read_text()


def section(text, title):
    return text.split(f"## {title}")[1].split("\n## ")[0]


@pytest.fixture(scope="module")
def made_report(tmp_path_factory):
    """DMC with an ablation and a missing task, Atari, a run that stopped and a foreign folder."""
    root = tmp_path_factory.mktemp("made")
    runs = root / "runs"
    for number, task in enumerate(DMC[:5]):
        for seed in (1, 2, 3):
            for name, level in (("base", 300), ("mooss", 600), ("cube", 500)):
                final = level + 10 * number + seed
                flags = {"mask_type": "cube"} if name == "cube" else {}
                write_run(runs, task, name, seed, {0: 5, 50_000: level / 2, 100_000: final},
                          **flags)
    for game in ("Pong", "Breakout"):
        for seed in (1, 2, 3):
            write_run(runs, game, "mooss", seed, {100_000: 2.0 + seed}, atari=True)
        write_run(runs, game, "base", 1, {100_000: 2.0}, atari=True)
    write_run(runs, "walker-walk", "mooss", 9, {0: 5, 50_000: 222}, provenance=PROVENANCE)
    (runs / "holiday").mkdir()
    make_report(runs, out=root / "out")
    return root / "out"


# ----------------------------------------------------------------------------------------- numbers
def test_report_recovers_the_papers_aggregates_from_its_table(made_report):
    """The published ones came from scores of runs, the table has means; Base's do not fit it."""
    rows = re.findall(
        r"\| (\w+)(, from its scores)? \(paper\) \| ([\d.]+) \| ([\d.]+) \| [13] x 26 \|",
        (made_report / "report.md").read_text())
    values = {(name, bool(own)): np.array([float(iqm), float(gap)]) for name, own, iqm, gap in rows}
    published = {"MLR": (0.432, 0.522), "Base": (0.292, 0.614), "MOOSS": (0.433, 0.524)}
    for name, aggregates in published.items():
        assert values[name, False].tolist() == [*aggregates]
        difference = np.abs(values[name, True] - aggregates).max()
        assert difference <= 0.0051 if name != "Base" else 0.02 < difference < 0.04


def test_report_shows_means_spreads_and_what_stands_behind(made_report):
    text = (made_report / "report.md").read_text()
    assert "Runs: 54 (53 finished, 0 short, 1 stopped). Tasks: 7. Folders skipped: 1." in text
    row = next(line for line in text.splitlines() if line.startswith("| finger-spin |"))
    assert row.startswith("| finger-spin | 303.5 ± 0.8 (3 x 4) | 603.5 ± 0.8 (3 x 4) |")
    assert "822 ± 6" in row and "853 ± 112" in row
    missing = next(line for line in text.splitlines() if line.startswith("| ball_in_cup-catch |"))
    assert "| missing | missing |" in missing and "944 ± 30" in missing
    assert "| mooss | 623.5 [" in text and "3 x 5" in text
    assert re.search(r"\| mooss \| [\d.]+ \[.*\] \| [\d.]+ \[.*\] \| 3 x 2 \|", text)
    assert "its spread being over the 10 episodes of that run" in text
    assert "no args.json" in section(text, "Skipped") and "holiday" in section(text, "Skipped")
    assert {path.name for path in made_report.iterdir()} >= {
        "report.md", "report.html", "curves_steps.png", "curves_hours.png",
        "atari_profiles_100000_1.png"}


def test_ablation_means_are_over_the_tasks_that_all_have(made_report):
    """The paper's means then, too: its cube row has 692.4 over six tasks."""
    text = section((made_report / "report.md").read_text(), "Ablation: Framework components")
    assert f"over the tasks that all our variants here have: {', '.join(DMC[:5])}." in text
    rows = {line.split(" | ")[0][2:]: line for line in text.splitlines() if line.startswith("| ")}
    assert rows["MOOSS, ours"].endswith("| missing | 623.5 | 623.5 |")
    assert rows["L = 6, p = 50% as MLR, ours"].endswith("| missing | 523.5 | 523.5 |")
    assert rows["L = 6, p = 0, ours"].count("missing") == 8
    paper = report.PAPER["ablation_components"]["L6_p50_cube"]
    mean = np.mean([paper[task]["mean"] for task in DMC[:5]])
    assert rows["L = 6, p = 50% as MLR, paper"].split(" | ")[-2] == f"{mean:.1f}"


def test_a_whole_ablation_has_the_printed_means(tmp_path):
    for task in DMC:
        write_run(tmp_path / "runs", task, "cube", 1, {100_000: 500}, mask_type="cube")
    text = section(make_report(tmp_path / "runs"), "Ablation: Framework components")
    assert "not the mean of its cells, which is 676.2." in text
    assert "| 501.5 | 501.5 |" in text and "656 ± 5" in text
    paper = report.PAPER["ablation_components"]["L6_p50_cube"]
    assert f"| {paper['_mean']} | {paper['_median']} |" in text


def test_fewer_than_three_seeds_show_their_points(tmp_path):
    """No interval, no band and no spread is made of two runs."""
    for seed in (1, 2):
        for task in DMC[:2]:
            write_run(tmp_path / "runs", task, "mooss", seed, {0: 1, 100_000: 500 + seed})
    text = make_report(tmp_path / "runs")
    assert "| finger-spin | 502.5, 503.5 (2 x 4) |" in text
    assert "| mooss | 502.5, 503.5 | 502.5, 503.5 | 502.5, 503.5 | 2 x 2 |" in text
    for seed in (3,):
        for task in DMC[:2]:
            write_run(tmp_path / "runs", task, "mooss", seed, {0: 1, 100_000: 500 + seed})
    text = make_report(tmp_path / "runs")
    assert "| finger-spin | 503.5 ± 0.8 (3 x 4) |" in text
    assert re.search(r"\| mooss \| 503.5 \[50[23].\d, 50[345].\d\] \|", text)


def test_variants_with_other_tasks_stand_in_no_common_aggregate(tmp_path):
    """On DMC as on Atari, where the paper's scores of the same games stand beside ours."""
    runs = tmp_path / "runs"
    for name, tasks in (("mooss", DMC[:2]), ("base", DMC[:2]), ("other", DMC[:3])):
        for task in tasks:
            write_run(runs, task, name, 1, {100_000: 500})
    write_run(runs, DMC[5], "alone", 1, {100_000: 500})
    for name, games in (("mooss", ["Pong", "Krull"]), ("base", ["Pong", "Hero"])):
        for game in games:
            write_run(runs, game, name, 1, {100_000: 10}, atari=True)
    text = make_report(runs)
    tables = [[line.split(" | ")[0][2:] for line in part.splitlines() if line.startswith("| ")][2:]
              for part in re.split(r"\n\nOver the \d tasks ", text)[1:]]
    assert [names[:2] for names in tables] == [["other"], ["base", "mooss"]] or \
        [set(names) & {"base", "mooss", "other", "alone"} for names in tables][0] == {"other"}
    for ours, games in (("mooss", "Krull, Pong"), ("base", "Hero, Pong")):
        table = text.split(f"Over 2 games ({games}):")[1].split("\n\n")[1]
        assert len(table.splitlines()) == 6 and f"| {ours} | " in table
        assert "| MOOSS, from its scores (paper) |" in table


# ---------------------------------------------------------------------------------- what was run
def test_runs_with_other_flags_share_no_cell(tmp_path):
    """Neither a preset's name nor --exp-name says what was run: the flags do."""
    one = tmp_path / "one"
    two = tmp_path / "two"
    write_run(one, "finger-spin", "mooss", 1, {100_000: 600}, batch_size=512)
    write_run(two, "finger-spin", "mooss", 1, {100_000: 900})
    write_run(two, "finger-spin", "mooss", 2, {100_000: 100}, batch_size=192, preset="laptop")
    write_run(two, "finger-spin", "mooss", 3, {100_000: 200}, batch_size=192)
    write_run(two, "finger-spin", "mooss", 4, {100_000: 300}, script="my_variant", my_coef=2.5)
    text = make_report(one, one / "finger-spin__mooss__s1", two)
    assert "Runs: 4 (4 finished" in text and "Folders skipped: 1." in text
    assert "the same settings, task and seed as" in section(text, "Skipped")
    assert "| task | mooss #1 | mooss #2 | mooss #3 |" in text
    assert ("| finger-spin | 601.5 (1 x 4) | 101.5, 201.5 (2 x 4) | 301.5 (1 x 4) |") in text
    variants = section(text, "Variants")
    assert "| mooss #1 | DMC | finger-spin | nothing |" in variants
    assert "| mooss #2 | DMC | finger-spin | batch_size 192 |" in variants
    assert "| mooss #3 | DMC | finger-spin | my_coef 2.5, script my_variant |" in variants


def test_flags_that_only_touch_where_a_run_runs_do_not_part_seeds(tmp_path):
    """Nor do the paper's own values for a task, nor the length of a DMC run."""
    runs = tmp_path / "runs"
    write_run(runs, "finger-spin", "mooss", 1, {100_000: 600}, device="cpu", action_repeat=2)
    write_run(runs, "finger-spin", "mooss", 2, {100_000: 700, 500_000: 5}, total=500_000,
              run_root="elsewhere", log_every=7, source="12345678")
    write_run(runs, "cartpole-swingup", "mooss", 1, {100_000: 700}, action_repeat=8)
    text = make_report(runs)
    assert "| finger-spin | 601.5, 701.5 (2 x 4) |" in text
    assert "| mooss | DMC | cartpole-swingup, finger-spin | nothing |" in text


def test_ablation_tables_hold_only_what_has_the_flags(tmp_path):
    """A run named `cube` without cubes is none; other sizes have a table of their own."""
    runs = tmp_path / "runs"
    write_run(runs, "finger-spin", "cube", 1, {100_000: 600})
    assert "Ablation" not in make_report(runs)
    write_run(runs, "finger-spin", "cube", 2, {100_000: 700}, mask_type="cube")
    write_run(runs, "finger-spin", "cube", 3, {100_000: 800}, mask_type="cube", batch_size=9)
    parts = make_report(runs).split("## Ablation")[1:]
    assert ["701.5 (1 x 4)" in part for part in parts] == [False, True]
    assert ["801.5 (1 x 4)" in part for part in parts] == [True, False]
    assert "differ from the paper's runs in: batch_size 9." in parts[0]
    assert "differ from the paper's runs in: nothing." in parts[1]


def test_report_lists_each_run_with_its_size_hours_and_interval(tmp_path):
    runs = tmp_path / "runs"
    write_run(runs, "Pong", "base", 1, {0: -21, 400: 10}, atari=True, episodes=3, total=400)
    folder = write_run(runs, "Pong", "mooss", 1, {400: 10}, atari=True, episodes=20, total=400)
    rows = [f"{step},{0.5 if step < 360 else 0.75 + step / 4000}" for step in range(0, 400, 20)]
    rows.insert(3, "50,")
    (folder / "train.csv").write_text("step,mooss/rank_accuracy\n" + "\n".join(rows))
    text = make_report(runs)
    assert "| Pong | base | 1 | 400 | short | 0.0 | 3 | 11.0 | - | - |" in text
    pattern = (r"\| Pong \| mooss \| 1 \| 400 \| short \| 0.0 \| 20 \| 19.5 \| "
               r"\[(.*), (.*)\] \| 0.84 \|")
    low, high = map(float, re.search(pattern, text).groups())
    assert 16.6 < low < 17.4 and 21.6 < high < 22.4  # returns 10 to 29: a standard error of 1.29
    assert not list(Path("out").glob("atari_profiles*"))  # a game alone makes no aggregate


def test_stopped_runs_are_marked_and_stand_in_no_result(made_report):
    text = (made_report / "report.md").read_text()
    row = "| walker-walk | mooss | 9 | 50,000 | stopped before 100,000 | 0.5 | 4 | 223.5 | - | - |"
    assert row in section(text, "Runs")
    assert "223.5" not in text.replace(row, "")
    assert "| walker-walk | 343.5 ± 0.8 (3 x 4) | 643.5 ± 0.8 (3 x 4) |" in text


def test_report_shows_the_shorter_benchmark_of_a_run_that_goes_on(tmp_path):
    runs = tmp_path / "runs"
    write_run(runs, "finger-spin", "mooss", 1, {100_000: 600, 200_000: 700}, total=500_000)
    write_run(runs, "finger-spin", "mooss", 2, {50_000: 650}, total=500_000)
    text = make_report(runs)
    row = "| finger-spin | mooss | 1 | 200,000 | stopped before 500,000 | 2.0 | 4 | 701.5 | - | - |"
    assert row in text and "(0 finished, 0 short, 2 stopped)" in text
    assert "| finger-spin | 601.5 (1 x 4) |" in text


def test_report_gives_a_length_of_one_run_alone_no_section(tmp_path):
    """A mean over one run that ended anywhere says nothing; shared lengths have their table."""
    write_run(tmp_path / "runs", "finger-spin", "mooss", 1, {25_146: 600}, total=25_146)
    for task in ("reacher-easy", "walker-walk"):
        write_run(tmp_path / "runs", task, "mooss", 1, {50_000: 600}, total=50_000)
    text = make_report(tmp_path / "runs")
    assert re.findall(r"## DeepMind Control, (.*) env", text) == ["50,000"]
    assert "| finger-spin | mooss | 1 | 25,146 | short | 0.3 | 4 | 601.5 | - | - |" in text


def test_report_gives_no_rank_accuracy_where_there_is_nothing_to_rank(tmp_path):
    for name, window in (("window0", 0), ("window2", 2)):
        folder = write_run(
            tmp_path / "runs", "finger-spin", name, 1, {100_000: 600}, temporal_window=window)
        (folder / "train.csv").write_text("step,mooss/rank_accuracy\n5,0\n")
    rows = re.findall(r"\| (window\d) .* \| (\S+) \|\n", section(
        make_report(tmp_path / "runs"), "Runs"))
    assert rows == [("window0", "-"), ("window2", "0.00")]


def test_provenance_is_shown_where_a_run_has_it(made_report, tmp_path):
    written = common.provenance(dmc.__file__, torch.device("cpu"), dmc.PACKAGES)
    assert list(PROVENANCE) == list(written)
    text = section((made_report / "report.md").read_text(), "Runs")
    row = next(line for line in text.splitlines() if "Analytical Engine with 2 cores" in line)
    assert row.startswith("| walker-walk | mooss | 9 | 0123456... with changes |")
    assert "| 3.3.2 | - |" in row and text.count("Analytical") == 1
    write_run(tmp_path / "runs", "finger-spin", "mooss", 1, {100_000: 600})
    assert "hardware" not in make_report(tmp_path / "runs")


# ------------------------------------------------------------------------------------------- edges
def test_report_without_a_run_says_so(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for path in ("empty", "nowhere"):
        with pytest.raises(SystemExit) as ended:
            common.exit_with(lambda path=path: report.main([path, "--out", "out"]))
        error = capsys.readouterr().err
        assert ended.value.code == 2 and not (tmp_path / "out").exists()
        assert f"error: no run with a whole evaluation in {path}\n" in error


def test_a_name_that_no_folder_can_have_does_not_stop_the_report(tmp_path):
    write_run(tmp_path / "runs", "finger-spin", "mooss", 1, {100_000: 600})
    text = make_report(tmp_path / "runs", "x" * 300)
    assert "| finger-spin |" in text and "File name too long" in text


def test_report_that_cannot_be_written_says_so(tmp_path, capsys):
    write_run(tmp_path / "runs", "finger-spin", "mooss", 1, {100_000: 600})
    (tmp_path / "file").write_text("")
    with pytest.raises(common.UsageError, match="cannot write to file"):
        report.main(["runs", "--out", "file"])
    with pytest.raises(common.UsageError, match="--bootstrap 0 is out of range"):
        report.main(["runs", "--bootstrap", "0"])


def damage_args(**changes):
    def damage(folder):
        args = json.loads((folder / "args.json").read_text())
        (folder / "args.json").write_text(json.dumps({**args, **changes}))
    return damage


def write(name, content):
    def damage(folder):
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_bytes(content)
    return damage


def as_folder(name):
    def damage(folder):
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()
    return damage


HEAD = b"step,update,hours,episode,return,length\n"
DAMAGES = {
    "eval.csv of random bytes": write("eval.csv", random.Random(0).randbytes(3000)),
    "eval.csv of words": write("eval.csv", HEAD + b"one,two,three,four,five,six\n"),
    "eval.csv cut in a row": write("eval.csv", HEAD + b"100000,25,"),
    "eval.csv without rows": write("eval.csv", HEAD),
    "eval.csv empty": write("eval.csv", b""),
    "eval.csv with 1e308": write("eval.csv", HEAD + b"100000,25,1,0,1e308,9\n" * 4),
    "eval.csv with nan": write("eval.csv", HEAD + b"100000,25,1,0,nan,9\n" * 4),
    "eval.csv with inf hours": write("eval.csv", HEAD + b"100000,25,inf,0,1,9\n" * 4),
    "eval.csv with 200 kB": write("eval.csv", HEAD + b"1" * 200_000 + b",25,1,0,1,9\n"),
    "eval.csv with a long number": write("eval.csv", HEAD + b"1" * 5000 + b",25,1,0,1,9\n"),
    "eval.csv a folder": as_folder("eval.csv"),
    "train.csv of random bytes": write("train.csv", random.Random(1).randbytes(3000)),
    "train.csv of words": write("train.csv", b"step,mooss/rank_accuracy\n5,good\n"),
    "train.csv a folder": as_folder("train.csv"),
    "args.json cut": write("args.json", b'{"env_id": "finger'),
    "args.json a list": write("args.json", b"[1, 2]"),
    "args.json nested": write("args.json", b"[" * 90_000),
    "args.json of 200 kB": write("args.json", b'"' + b"x" * 200_000 + b'"'),
    "args.json a folder": as_folder("args.json"),
    "a seed of words": damage_args(seed="7"),
    "a seed of truth": damage_args(seed=True),
    "a long name": damage_args(exp_name="x" * 200_000),
    "a dollar in the name": damage_args(exp_name="$x^{2$"),
    "markup in the name": damage_args(exp_name="<script>alert(1)</script>"),
    "a name of a number": damage_args(exp_name=5),
    "no name": damage_args(exp_name=None),
    "markup in the task": damage_args(env_id="a|b<c"),
    "a task in a list": damage_args(env_id=["finger-spin"]),
    "a preset with a slash": damage_args(preset="../../laptop"),
    "no length": damage_args(total_timesteps="long"),
    "an infinite length": damage_args(total_timesteps=float("inf")),
    "episodes of a table": damage_args(eval_episodes={}),
    "provenance of a list": damage_args(provenance=[1]),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_folder_is_skipped_with_its_reason_and_the_rest_is_reported(what, tmp_path):
    runs = tmp_path / "runs"
    write_run(runs, "finger-spin", "mooss", 1, {100_000: 600})
    DAMAGES[what](write_run(runs, "walker-walk", "mooss", 7, {100_000: 600}))
    found, skipped = report.read_runs([runs])
    assert [run.task for run in found] == ["finger-spin"]
    (folder, reason), = skipped
    assert folder.endswith("walker-walk__mooss__s7") and 5 < len(reason) < 300, reason


def test_random_damage_to_whole_folders_never_ends_in_a_traceback(tmp_path):
    """Flipped, cut, doubled, removed and swapped files: a run is read, or skipped with a reason."""
    rng = random.Random(0)
    pristine = write_run(tmp_path / "runs", "finger-spin", "mooss", 1, {0: 5, 100_000: 600})
    (pristine / "train.csv").write_text("step,mooss/rank_accuracy\n" + "5,0.5\n" * 20)
    files = {path.name: path.read_bytes() for path in pristine.iterdir()}
    read = 0
    for _ in range(300):
        for name, data in files.items():
            (pristine / name).write_bytes(data)
        name = rng.choice(sorted(files))
        data = bytearray(files[name])
        kind = rng.randrange(4)
        if kind == 0:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[rng.randrange(len(data)):]
        elif kind == 2:
            data *= 2
        else:
            data = files[rng.choice(sorted(files))]
        (pristine / name).write_bytes(data)
        runs, skipped = report.read_runs([tmp_path / "runs"])
        assert len(runs) + len(skipped) == 1
        read += len(runs)
    assert 30 < read < 270


def test_a_whole_report_over_damaged_folders_is_whole(tmp_path, capsys):
    """Also with hostile names of folders and values of flags; both pages carry them as text."""
    runs = tmp_path / "runs"
    write_run(runs, "finger-spin", "mooss", 1, {0: 1, 100_000: 600})
    write_run(runs, "finger-spin", "mooss", 2, {0: 1, 100_000: 600},
              my_flag="a|b <script>alert(1)</script> `c` *d* $e$ [f](javascript:g)\n# h")
    for number, damage in enumerate(DAMAGES.values()):
        damage(write_run(runs, "walker-walk", "mooss", number, {100_000: 600}))
    (runs / "a|b\n<b>bold<").mkdir()
    (runs / b"\xff\xfe".decode("utf-8", "surrogateescape")).mkdir()
    text = make_report(runs)
    page = Path("out", "report.html").read_text()
    assert f"Folders skipped: {len(DAMAGES) + 2}." in text
    assert "<script" not in text + page and "<b>" not in text + page
    assert r"a\|b &lt;script&gt;alert(1)&lt;/script&gt; \`c\` \*d\* \$e\$ [f]\(java" in text
    assert "a|b &lt;script&gt;alert(1)&lt;/script&gt; `c`" in page
    for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1
    assert len(capsys.readouterr().err.splitlines()) == len(DAMAGES) + 2


# ------------------------------------------------------------------------------------------- pages
def test_legends_cover_no_curve(tmp_path, monkeypatch):
    runs = tmp_path / "runs"
    for number in range(7):
        for task in ("finger-spin", "walker-walk"):
            write_run(runs, task, f"some_variant_{number}", 1, {0: 100 * number, 100_000: 600})
    for game in ("Pong", "Breakout"):
        write_run(runs, game, "mooss", 1, {0: 0, 100_000: 2}, atari=True)
    seen = []

    def look(document, name, figure, caption):
        figure.canvas.draw()
        for axes in figure.axes:
            legend = axes.get_legend()
            if legend is not None:
                box = legend.get_window_extent()
                seen.append(len(legend.get_texts()))
                assert not any(other.get_window_extent().overlaps(box) for other in figure.axes)
        report.plt.close(figure)

    monkeypatch.setattr(report.Document, "figure", look)
    assert report.main([str(runs), "--out", "out", "--bootstrap", "50"]) == 0
    assert sorted(seen) == [1, 1, 1, 1, 1, 7, 7, 8, 8]


def open_in_browser(page, tmp_path, script):
    """What a real browser, its window 1400 pixels wide, has made of the page and of a script."""
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("needs Debian's chromium")
    copy = tmp_path / "page.html"
    copy.write_text(page.read_text().replace("</body>", f"<script>{script}</script></body>"))
    done = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
         "--disable-sync", "--disable-background-networking", "--disable-component-update",
         "--disable-quic", f"--user-data-dir={tmp_path / 'browser'}", "--window-size=1400,1000",
         "--enable-logging=stderr", "--virtual-time-budget=2000", "--dump-dom", f"file://{copy}"],
        capture_output=True, text=True, timeout=300)
    assert done.returncode == 0
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout


WIDTHS = """
const boxes = [...document.querySelectorAll("table, img")].map(x => x.getBoundingClientRect());
document.title = JSON.stringify({window: innerWidth, page: document.documentElement.scrollWidth,
  right: Math.max(...boxes.map(box => box.right)), left: Math.min(...boxes.map(box => box.left))});
"""


def test_page_is_self_contained_and_renders_in_a_browser(made_report, tmp_path):
    page = (made_report / "report.html").read_text()
    assert not re.search(r"(src|href)=\"(?!data:)", page)
    dom = open_in_browser(made_report / "report.html", tmp_path, "")
    assert dom.count("<table") >= 5 and dom.count("<img") >= 3


@pytest.mark.parametrize("what", ["checked in", "made", "crowded"])
def test_no_table_is_wider_than_a_window_of_1400_pixels(what, made_report, tmp_path):
    """Not even with many variants of long names, long settings and long reasons."""
    page = made_report / "report.html"
    if what == "checked in":
        page = ROOT / "benchmark" / "results" / "report" / "report.html"
    if what == "crowded":
        for number in range(9):
            name = f"a_name_as_long_as_names_can_be_{'x' * 60}{number}"
            for seed in (1, 2):
                write_run(tmp_path / "runs", "finger-spin", name, seed, {100_000: 600},
                          wandb_group="x" * 3000, my_flag="y" * 3000, provenance={
                              **PROVENANCE, "command": "z" * 3000})
        (tmp_path / "runs" / ("w" * 200)).mkdir()
        make_report(tmp_path / "runs")
        page = tmp_path / "out" / "report.html"
    dom = open_in_browser(page, tmp_path, WIDTHS)
    sizes = json.loads(re.search("<title>(.*)</title>", dom)[1])
    assert sizes["window"] == 1400 and sizes["page"] <= 1400
    assert 0 <= sizes["left"] and 300 < sizes["right"] <= 1400


def test_the_checked_in_report_is_made_from_the_checked_in_runs():
    results = ROOT / "benchmark" / "results"
    for folder in (results / "runs").iterdir():
        names = {path.name for path in folder.iterdir()}
        assert names == {"args.json", "eval.csv", "train.csv"}, folder
    assert report.main([str(results / "runs"), "--out", "out"]) == 0
    text = Path("out", "report.md").read_text()
    assert text == (results / "report" / "report.md").read_text()
    assert "Folders skipped: 0." in text
    rows = [line for line in section(text, "Runs").splitlines() if line.startswith("| ")]
    assert len(rows) > 3
    page = (ROOT / "benchmark" / "README.md").read_text()
    assert [row for row in rows if row not in page] == []


def test_checked_in_data_is_whole():
    assert len(report.GAMES) == 26 and report.TASKS == DMC
    for title, variants in report.ABLATIONS.values():
        assert title and set(variants) <= set(sweep.VARIANTS)
    for key in ("ablation_components", "ablation_decoder", "ablation_depth"):
        rows = {row for _, row in report.ABLATIONS[key][1].values()}
        assert rows == set(report.PAPER[key])
