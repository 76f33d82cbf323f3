"""Sweeps, report and figures: exact lists of runs, real runs from command to page, the paper's aggregates."""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

import rainbow_mooss_atari as atari
import sac_mooss_dmc as dmc
from conftest import ROOT, TINY, TINY_ATARI, make_dot_env, make_dot_game, tiny_agent, tiny_args

sys.path.insert(0, str(ROOT / "benchmark"))
import figures
import report
import sweep

TINY_RUN = ("--total-timesteps 60 --min-replay 40 --batch-size 2 --channels 4 4 4 --hidden-units 8 --eval-episodes 2 "
            "--max-frames 400 --buffer-size 200 --device cpu --checkpoint-every 20").split()


# ---------------------------------------------------------------------------------------------- sweep
PUBLISHED_GAMES = ("Alien Amidar Assault Asterix BankHeist BattleZone Boxing Breakout ChopperCommand CrazyClimber "
                   "DemonAttack Freeway Frostbite Gopher Hero Jamesbond Kangaroo Krull KungFuMaster MsPacman Pong "
                   "PrivateEye Qbert RoadRunner Seaquest UpNDown").split()
DMC = ["finger-spin", "cartpole-swingup", "reacher-easy", "cheetah-run", "walker-walk", "ball_in_cup-catch"]
EXPECTED = {  # tasks, flags that tell the variants apart, steps
    "dmc100k": (DMC, ["--aux-weight 0", ""], 100_000), "dmc500k": (DMC, ["--aux-weight 0", ""], 500_000),
    "dmc_hard": (["reacher-hard", "walker-run"], ["--aux-weight 0", ""], 500_000),
    "atari100k": (sorted(PUBLISHED_GAMES), ["--aux-weight 0", ""], 100_000),
    "ablation_components": (DMC, ["--aux-weight 0", "--temporal-window 0 --mask-ratio 0",
                                  "--temporal-window 6 --mask-ratio 0", "--mask-type cube", ""], 100_000),
    "ablation_decoder": (DMC, ["--decoder-inputs none", "--decoder-inputs s", "--decoder-inputs sar", ""], 100_000),
    "ablation_depth": (DMC, ["--decoder-depth 1", "", "--decoder-depth 3", "--decoder-depth 4"], 100_000),
    "ablation_window": (DMC, ["--temporal-window 0", "--temporal-window 2", "--temporal-window 4", "",
                              "--temporal-window 8"], 100_000),
    "ablation_mask_ratio": (DMC, ["--mask-ratio 0.1", "--mask-ratio 0.3", "", "--mask-ratio 0.7", "--mask-ratio 0.9"],
                            100_000)}


@pytest.mark.parametrize("suite", sweep.SUITES)
def test_dry_run_lists_exactly_the_runs_of_the_table(suite, capsys):
    assert sweep.main([suite, "--dry-run", "--seeds", "1", "2", "--seconds-per-update", "2"]) == 0
    *commands, summary = capsys.readouterr().out.splitlines()
    tasks, variants, steps = EXPECTED[suite]
    found = []
    for command in commands:
        pattern = (r"python \S+\.py --env-id (\S+) --seed (\d) --exp-name \S+ --run-root runs --preset paper "
                   r"--total-timesteps (\d+) ?(.*?) ?--resume")
        task, seed, total, flags = re.fullmatch(pattern, command).groups()
        found.append((task, int(seed), int(total), flags))
    assert sorted(found) == sorted((task, seed, steps, flags) for task in tasks for seed in (1, 2)
                                   for flags in variants)
    names = [re.search(r"--env-id (\S+) --seed (\d) --exp-name (\S+)", command).groups() for command in commands]
    assert len(set(names)) == len(names)
    updates = int(re.search(r"([\d,]+) updates", summary)[1].replace(",", ""))
    if suite == "dmc100k":
        per_task = [50_000, 12_500, 25_000, 25_000, 50_000, 25_000]
        assert updates == 2 * 2 * (sum(per_task) - 6 * 1000)
    if suite == "atari100k":
        assert updates == 26 * 2 * 2 * 98_000 * 2
    assert f"{updates * 2 / 3600:,.0f} hours at 2.0 s" in summary


def test_flags_pass_through_and_bad_ones_are_refused(capsys):
    sweep.main("dmc100k --dry-run --only reacher-easy --seeds 7 --num-filters 8 --share-mask".split())
    commands = capsys.readouterr().out.splitlines()[:-1]
    assert len(commands) == 2 and all("--num-filters 8 --share-mask" in command for command in commands)
    with pytest.raises(sweep.common.UsageError, match="reacher-easy"):
        sweep.main(["dmc100k", "--dry-run", "--only", "reacher-eazy"])
    with pytest.raises(sweep.common.UsageError, match="--cube-size"):
        sweep.main(["dmc100k", "--dry-run", "--cube-size", "5"])


def start_sweep(run_root, *words, **environment):
    command = [sys.executable, str(ROOT / "benchmark" / "sweep.py"), "atari100k", "--only", "Breakout", "--run-root",
               str(run_root), *TINY_RUN, *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env={**os.environ, **environment})


def finish(process, seconds=300):
    out, error = process.communicate(timeout=seconds)
    return process.returncode, out, error


def rows_in(file):
    return len(file.read_text().splitlines()) - 1 if file.exists() else 0


def wait_for(condition, seconds=90):
    until = time.time() + seconds
    while not condition():
        assert time.time() < until, "waited too long"
        time.sleep(0.05)


def test_local_sweep_of_real_runs_ends_in_a_report(tmp_path):
    code, out, error = finish(start_sweep(tmp_path / "runs", "--seeds", "1", "--workers", "2", "--threads", "1"))
    assert code == 0, error
    assert "2 done" in out.splitlines()[-1]
    again, out, _ = finish(start_sweep(tmp_path / "runs", "--seeds", "1"))
    assert again == 0 and "2 of them finished already" in out
    assert report.main([str(tmp_path / "runs"), "--out", str(tmp_path / "report"), "--bootstrap", "50"]) == 0
    text = (tmp_path / "report" / "report.md").read_text()
    assert "Atari, 60 interactions" in text
    assert re.search(r"\| Breakout \| -?[\d.]+ \(1 x 2\) \| -?[\d.]+ \(1 x 2\) \|", text)


def test_a_killed_run_is_reported_and_resumed_by_the_same_command(tmp_path):
    words = ("--seeds", "1", "--variants", "mooss")
    long = ("--total-timesteps", "200")
    process = start_sweep(tmp_path, *words, *long)
    folder = tmp_path / "Breakout__mooss__s1"
    wait_for((folder / "checkpoint.pt").exists)
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    os.kill(int(children[0]), signal.SIGKILL)
    code, out, error = finish(process)
    assert code == 1 and "1 failed" in out and "Breakout__mooss__s1 failed; the end of" in error
    code, out, error = finish(start_sweep(tmp_path, *words, *long))
    assert code == 0 and "1 done" in out, error
    assert "resuming" in (tmp_path / "logs" / "Breakout__mooss__s1.log").read_text()


def test_a_failing_run_is_reported_and_does_not_stop_the_others(tmp_path):
    (tmp_path / "Breakout__base__s1").mkdir()
    (tmp_path / "Breakout__base__s1" / "notes.txt").write_text("not a run")
    code, out, error = finish(start_sweep(tmp_path, "--seeds", "1"))
    assert code == 1 and "1 done  1 failed" in out.splitlines()[-1]
    assert "Breakout__base__s1 failed" in error and "holds no run of ours" in error


def test_stopping_a_sweep_checkpoints_its_runs(tmp_path):
    """The runs checkpoint only when told to."""
    words = "--seeds 1 --variants mooss --total-timesteps 5000 --checkpoint-every 0 --log-every 5".split()
    process = start_sweep(tmp_path, *words)
    folder = tmp_path / "Breakout__mooss__s1"
    wait_for(lambda: rows_in(folder / "train.csv") > 1)
    assert not (folder / "checkpoint.pt").exists()
    process.send_signal(signal.SIGINT)
    code, _, _ = finish(process)
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert code == 128 + signal.SIGINT and 40 <= state["step"] < 5000


def test_a_sweep_refuses_a_folder_with_other_flags(tmp_path):
    """Also one that is finished; but a longer DMC run holds the shorter one."""
    def sweep_of(suite, task, *words):
        return sweep.main([suite, "--only", task, "--variants", "base", "--seeds", "1", "--run-root", str(tmp_path),
                           "--dry-run", *words])

    for module, task, words in ((dmc, "reacher-easy", ["--total-timesteps", "500000"]), (atari, "Pong", [])):
        flags = ["--env-id", task, "--exp-name", "base", "--aux-weight", "0", "--run-root", str(tmp_path), *words]
        args = module.resolve_args(module.common.parse_args(module.Args, flags))
        folder = module.common.RunFolder(args).path
        folder.mkdir()
        (folder / "args.json").write_text(json.dumps(dataclasses.asdict(args)))
    assert sweep_of("dmc100k", "reacher-easy") == sweep_of("atari100k", "Pong") == 0
    with pytest.raises(sweep.common.UsageError, match="render_size was 100, is 50"):
        sweep_of("dmc100k", "reacher-easy", "--preset", "laptop")
    with pytest.raises(sweep.common.UsageError, match="total_timesteps was 100000, is 50000"):
        sweep_of("atari100k", "Pong", "--total-timesteps", "50000")


@pytest.fixture
def slurm(tmp_path):
    if shutil.which("slurmctld") is None or os.geteuid() != 0:
        pytest.skip("needs root and Debian's slurm-wlm and munge")
    state = tmp_path / "slurm"
    started = subprocess.run(["bash", str(ROOT / "tests" / "local_slurm.sh"), "start", str(state)],
                             capture_output=True, text=True)
    assert started.returncode == 0, started.stderr
    yield {"SLURM_CONF": str(state / "slurm.conf")}
    environment = {**os.environ, "SLURM_CONF": str(state / "slurm.conf")}
    subprocess.run(["scancel", "--user", "root"], env=environment)
    time.sleep(1)
    subprocess.run(["bash", str(ROOT / "tests" / "local_slurm.sh"), "stop", str(state)])


def test_slurm_array_survives_the_time_limit_signal(tmp_path, slurm):
    """Two runs as an array on a real cluster; one gets the signal, checkpoints, requeues itself and finishes."""
    environment = {**os.environ, **slurm}

    def ask(*command):
        return subprocess.run(command, env=environment, capture_output=True, text=True).stdout

    words = ("--seeds 1 2 --variants mooss --cluster slurm --gpus 0 --threads 1 --memory-gb 2 --time-hours 0.5 "
             "--total-timesteps 300 --log-every 5 --checkpoint-every 0").split()
    process = start_sweep(tmp_path / "runs", *words, **slurm)
    folder = tmp_path / "runs" / "Breakout__mooss__s1"
    wait_for(lambda: rows_in(folder / "train.csv") > 0)
    job = ask("squeue", "--noheader", "--array", "--format=%i").split()
    job = sorted(job)[0]
    ask("scancel", "--signal=USR2", job)
    wait_for(lambda: f"{job} PENDING" in ask("squeue", "--noheader", "--array", "--format=%i %T"))
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)["step"]
    assert 40 <= saved < 300
    # Slurm lets a requeued job wait for two minutes; within its first seconds the old credential still counts.
    ask("scontrol", "update", f"JobId={job}", "StartTime=now+5")
    code, out, error = finish(process)
    assert code == 0, error
    assert "2 done" in out.splitlines()[-1] and "submitted 2 runs as Slurm array" in out
    assert f"at step {saved}" in (tmp_path / "runs" / "logs" / "Breakout__mooss__s1.log").read_text()


# ---------------------------------------------------------------------------------------------- report
def test_report_recovers_the_papers_aggregates_from_its_table(made_report):
    """Published values came from per-run scores; the table has per-game means. Base's do not fit its own scores."""
    rows = re.findall(r"\| (\w+)(, from its scores)? \(paper\) \| ([\d.]+) \| ([\d.]+) \| [13] x 26 \|",
                      (made_report / "report.md").read_text())
    values = {(name, bool(own)): np.array([float(iqm), float(gap)]) for name, own, iqm, gap in rows}
    published = {"MLR": (0.432, 0.522), "Base": (0.292, 0.614), "MOOSS": (0.433, 0.524)}
    for name, aggregates in published.items():
        assert values[name, False].tolist() == [*aggregates]
        difference = np.abs(values[name, True] - aggregates).max()
        assert difference <= 0.0051 if name != "Base" else 0.02 < difference < 0.04


def write_run(root, task, variant, seed, scores, atari=False, episodes=4, total=100_000, preset="paper", **more):
    folder = root / f"{task}__{variant}__s{seed}"
    folder.mkdir(parents=True)
    args = dict(env_id=task, exp_name=variant, seed=seed, total_timesteps=total, eval_episodes=episodes,
                preset=preset, **({"multi_step": 10} if atari else {}), **more)
    (folder / "args.json").write_text(json.dumps(args))
    lines = ["step,update,hours,episode,return,length"]
    lines += [f"{step},{step // 4},{step / 1e5},{number},{score + number},250"
              for step, score in scores.items() for number in range(episodes)]
    (folder / "eval.csv").write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def made_report(tmp_path_factory):
    """A report over made-up runs: DMC with an ablation and a missing task, Atari, an incomplete and a foreign one."""
    root = tmp_path_factory.mktemp("made")
    for number, task in enumerate(DMC[:5]):
        for seed in (1, 2, 3):
            for variant, level in (("base", 300), ("mooss", 600), ("cube", 500)):
                final = level + 10 * number + seed
                write_run(root / "runs", task, variant, seed, {0: 5, 50_000: level / 2, 100_000: final})
    for game in ("Pong", "Breakout"):
        for seed in (1, 2):
            write_run(root / "runs", game, "mooss", seed, {100_000: 2.0}, atari=True)
    write_run(root / "runs", "walker-walk", "mooss", 9, {0: 5})
    (root / "runs" / "holiday").mkdir()
    code = report.main([str(root / "runs"), "--out", str(root / "out"), "--bootstrap", "100"])
    assert code == 0
    return root / "out"


def test_report_shows_means_spreads_and_what_stands_behind(made_report):
    text = (made_report / "report.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith("| finger-spin |"))
    assert "303.5 ± 0.8 (3 x 4) | 603.5 ± 0.8 (3 x 4)" in row and "822 ± 6" in row and "853 ± 112" in row
    missing = next(line for line in text.splitlines() if line.startswith("| ball_in_cup-catch |"))
    assert "| missing | missing |" in missing and "944 ± 30" in missing
    assert "| mooss | 623.5 [" in text and "3 x 5" in text
    assert re.search(r"\| mooss \| [\d.]+ \[.*\] \| [\d.]+ \[.*\] \| 2 x 2 \|", text)  # Atari: IQM and optimality gap
    assert "its spread being over the 10 episodes of that run" in text
    assert "Ablation: Framework components" in text and "656 ± 5" in text  # the paper's cube row
    assert "not the mean of its cells, which is 676.2." in text
    assert "(5/6 tasks)" in text
    assert "holiday" in text and "no args.json" in text and "incomplete: step 0 of 100,000" in text
    assert {path.name for path in made_report.iterdir()} >= {"report.md", "report.html", "curves_steps.png",
                                                             "curves_hours.png", "atari_profiles_100000.png"}


def test_report_lists_each_run_with_its_size_hours_and_interval(tmp_path):
    write_run(tmp_path / "runs", "Pong", "base", 1, {0: -21, 400: 10}, atari=True, episodes=3, total=400)
    write_run(tmp_path / "runs", "Pong", "mooss", 1, {400: 10}, atari=True, episodes=20, total=400)
    rows = [f"{step},{0.5 if step < 360 else 0.75 + step / 4000}" for step in range(0, 400, 20)]
    rows.insert(3, "50,")
    (tmp_path / "runs" / "Pong__mooss__s1" / "train.csv").write_text("step,mooss/rank_accuracy\n" + "\n".join(rows))
    assert report.main([str(tmp_path / "runs"), "--out", str(tmp_path / "out"), "--bootstrap", "50"]) == 0
    text = (tmp_path / "out" / "report.md").read_text()
    assert "| Pong | base | 1 | paper | 400 | 0.0 | 3 | 11.0 | - | - |" in text
    row = re.search(r"\| Pong \| mooss \| 1 \| paper \| 400 \| 0.0 \| 20 \| 19.5 \| \[(.*), (.*)\] \| 0.84 \|", text)
    low, high = map(float, row.groups())  # returns 10 to 29: a standard error of 1.29
    assert 16.6 < low < 17.4 and 21.6 < high < 22.4
    assert "| mooss | 1.139 | 0.000 | 1 x 1 |" in text  # one seed: no interval, and no profile of one score
    assert not list((tmp_path / "out").glob("atari_profiles*"))


def test_the_checked_in_report_is_made_from_the_checked_in_runs(tmp_path):
    results = ROOT / "benchmark" / "results"
    for folder in (results / "runs").iterdir():
        assert {path.name for path in folder.iterdir()} == {"args.json", "eval.csv", "train.csv"}, folder
    assert report.main([str(results / "runs"), "--out", str(tmp_path)]) == 0
    text = (tmp_path / "report.md").read_text()
    assert text == (results / "report" / "report.md").read_text()
    assert "Folders skipped: 0." in text
    table = text.split("## Runs")[1].split("## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    assert len(rows) > 3 and [row for row in rows if row not in (ROOT / "README.md").read_text()] == []


def test_report_keeps_sizes_apart_and_counts_a_run_once(tmp_path):
    """A laptop run shares no cell with full size; a run named twice counts once, its seed elsewhere is skipped."""
    one, two = tmp_path / "one", tmp_path / "two"
    write_run(one, "finger-spin", "mooss", 1, {100_000: 600})
    write_run(two, "finger-spin", "mooss", 1, {100_000: 900})
    write_run(two, "finger-spin", "mooss", 2, {100_000: 100}, preset="laptop")
    again = str(one / "finger-spin__mooss__s1")
    assert report.main([str(one), again, str(two), "--out", str(tmp_path / "out"), "--bootstrap", "50"]) == 0
    text = (tmp_path / "out" / "report.md").read_text()
    assert "| finger-spin | 601.5 (1 x 4) |" in text.split("## Preset paper")[1].split("## Preset laptop")[0]
    assert "| finger-spin | 101.5 (1 x 4) |" in text.split("## Preset laptop")[1]
    assert "Finished runs: 2." in text and "Folders skipped: 1." in text and "variant and seed as" in text


def test_report_shows_the_shorter_benchmark_of_a_run_that_goes_on(tmp_path):
    write_run(tmp_path / "runs", "finger-spin", "mooss", 1, {100_000: 600, 200_000: 700}, total=500_000)
    write_run(tmp_path / "runs", "finger-spin", "mooss", 2, {50_000: 600}, total=500_000)
    assert report.main([str(tmp_path / "runs"), "--out", str(tmp_path / "out"), "--bootstrap", "50"]) == 0
    text = (tmp_path / "out" / "report.md").read_text()
    assert "| finger-spin | mooss | 1 | paper | 100,000 | 1.0 | 4 | 601.5 | - | - |" in text
    assert "| finger-spin | 601.5 (1 x 4) |" in text and "incomplete: step 50,000 of 500,000" in text


def test_report_gives_a_length_of_one_run_alone_no_section(tmp_path):
    """A mean over one run that stopped anywhere says nothing; lengths that runs share do have their table."""
    write_run(tmp_path / "runs", "finger-spin", "mooss", 1, {25_146: 600}, total=25_146)
    for task in ("reacher-easy", "walker-walk"):
        write_run(tmp_path / "runs", task, "mooss", 1, {50_000: 600}, total=50_000)
    assert report.main([str(tmp_path / "runs"), "--out", str(tmp_path / "out"), "--bootstrap", "50"]) == 0
    text = (tmp_path / "out" / "report.md").read_text()
    assert re.findall(r"## DeepMind Control, (.*) env", text) == ["50,000"]
    assert "| finger-spin | mooss | 1 | paper | 25,146 | 0.3 | 4 | 601.5 | - | - |" in text


def test_report_gives_no_rank_accuracy_where_there_is_nothing_to_rank(tmp_path):
    for name, window in (("window0", 0), ("window2", 2)):
        write_run(tmp_path / "runs", "finger-spin", name, 1, {100_000: 600}, temporal_window=window)
        (tmp_path / "runs" / f"finger-spin__{name}__s1" / "train.csv").write_text("step,mooss/rank_accuracy\n5,0\n")
    assert report.main([str(tmp_path / "runs"), "--out", str(tmp_path / "out"), "--bootstrap", "50"]) == 0
    table = (tmp_path / "out" / "report.md").read_text().split("## Runs")[1]
    rows = re.findall(r"\| (window\d) .* \| (\S+) \|\n", table)
    assert rows == [("window0", "-"), ("window2", "0.00")]


def test_report_without_a_finished_run_says_so(tmp_path, capsys):
    assert report.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "no finished run" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_page_is_self_contained_and_renders_in_a_browser(made_report, tmp_path):
    page = (made_report / "report.html").read_text()
    assert not re.search(r"(src|href)=\"(?!data:)", page)
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("needs Debian's chromium")
    done = subprocess.run([browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
                           "--disable-background-networking", "--disable-component-update", "--disable-quic",
                           f"--user-data-dir={tmp_path}", "--enable-logging=stderr", "--virtual-time-budget=2000",
                           "--dump-dom", f"file://{made_report / 'report.html'}"],
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.count("<table") >= 5 and done.stdout.count("<img") >= 3
    assert "CONSOLE" not in done.stderr, done.stderr


def test_checked_in_data_is_whole():
    assert len(report.GAMES) == 26 and report.TASKS == DMC
    for title, variants in report.ABLATIONS.values():
        assert title and set(variants) <= set(sweep.VARIANTS)
    for key in ("ablation_components", "ablation_decoder", "ablation_depth"):
        assert {row for _, row in report.ABLATIONS[key][1].values()} == set(report.PAPER[key])


# ---------------------------------------------------------------------------------------------- figures
def test_rank_correlation_is_one_for_a_line_and_zero_for_noise():
    line = np.arange(figures.LENGTH)[:, None] * np.ones((1, 5))
    noise = np.random.default_rng(0).normal(size=(200, figures.LENGTH, 5))
    assert figures.rank_correlation([line, -line]) == pytest.approx(1.0)
    assert abs(figures.rank_correlation(noise)) < 0.02


def test_similarity_by_distance_reads_the_right_entries():
    """Query (b, i) and key (c, j): 10 - |i - j| + b where b = c, -3 elsewhere; j later than i counts one more."""
    length, count = 4, 3
    similarity = torch.full((count * length, count * length), -3.0)
    for b in range(count):
        for i in range(length):
            for j in range(length):
                similarity[b * length + i, b * length + j] = 10 - abs(i - j) + b + (j > i)
    blocks, mean, std, others = figures.by_distance(similarity, length)
    assert blocks[1].tolist() == [[11, 11, 10, 9], [10, 11, 11, 10], [9, 10, 11, 11], [8, 9, 10, 11]]
    assert mean.tolist() == [11, 10.5, 9.5, 8.5] and std.tolist() == [1, 1, 1, 1] and others == -3


def test_masks_of_the_figure_are_the_agents_own(tmp_path, monkeypatch):
    """The walk has the agent's root and connectivity."""
    agent, seen = tiny_agent(tiny_args(walk_root="fixed", walk_connectivity=6)), []
    draw = dmc.random_walk_masks
    monkeypatch.setattr(dmc, "random_walk_masks", lambda *args: seen.append(draw(*args)[0]) or seen[-1][None])
    frames = np.zeros((figures.LENGTH, 3, 3, 24, 24), np.uint8)
    for seed in range(5):
        figures.figure_masks(dmc, agent, (frames,), seed, tmp_path)
    nodes = [mask.flatten().nonzero().flatten().tolist() for mask in seen]
    root = seen[0].numel() // 2
    assert all(root in visited for visited in nodes) and len({tuple(visited) for visited in nodes}) > 1
    side = seen[0].shape[1]
    step = {1, side, side * side}  # with 6 neighbours every visited node has a visited one beside it
    assert all(any(abs(a - b) in step for b in visited) for visited in nodes for a in visited)


@pytest.mark.parametrize("kind,changes", [("dmc", {}), ("dmc", {"aux_weight": 0.0}), ("atari", {})])
def test_figures_of_a_checkpoint(kind, changes, tmp_path, monkeypatch, capsys):
    module, tiny, make = {"dmc": (dmc, TINY, make_dot_env), "atari": (atari, TINY_ATARI, make_dot_game)}[kind]
    monkeypatch.setattr(module, "make_env", make)
    args = module.Args(**{**tiny, **changes, "run_root": str(tmp_path), "total_timesteps": 60})
    assert module.main(args) == 0
    checkpoint = next(tmp_path.glob("*/checkpoint.pt"))
    assert figures.main([str(checkpoint), "--out", str(tmp_path / "out"), "--sequences", "3"]) == 0
    expected = {"states.png", "masks.png"} | (set() if changes else {"similarity.png"})
    assert {path.name for path in (tmp_path / "out").iterdir()} == expected
    assert all(path.stat().st_size > 5000 for path in (tmp_path / "out").iterdir())
    out = capsys.readouterr().out
    for name in ("untrained", "mooss"):
        assert re.search(rf"^{name}: rank correlation of temporal and state distance -?[01]\.\d+$", out, re.M)
    assert ("rank accuracy on these sequences" in out) == (not changes)


def test_figures_of_two_agents_stand_side_by_side(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(dmc, "make_env", make_dot_env)
    paths = []
    for name, changes in (("base", {"aux_weight": 0.0}), ("mooss", {}), ("large", {"render_size": 28})):
        args = dmc.Args(**{**TINY, **changes, "exp_name": name, "run_root": str(tmp_path), "total_timesteps": 60})
        assert dmc.main(args) == 0
        paths += map(str, tmp_path.glob(f"*__{name}__s*/checkpoint.pt"))
    out = ["--out", str(tmp_path / "out"), "--sequences", "3"]
    assert figures.main([*paths[:2], *out]) == 0
    values = re.findall(r"^(\w+): rank correlation of .* distance (.*)$", capsys.readouterr().out, re.M)
    assert [name for name, _ in values] == ["untrained", "base", "mooss"] and len({value for _, value in values}) == 3
    with pytest.raises(dmc.common.UsageError, match="another task or image size"):
        figures.main([*paths, *out])
    with pytest.raises(dmc.common.UsageError, match="at least one"):
        figures.main(out)
