"""The linear probe: it finds what is linear, pairs its arms, and reports what its CSV says."""

import csv
import re
import sys

import matplotlib
import numpy as np
import pytest
import torch

import mooss_common as common
from conftest import ROOT
from helpers import tiny

sys.path.insert(0, str(ROOT / "benchmark"))
import probe as probing

COLUMNS = ["arm", "seed", "point", "update", "seconds", "r2_position", "r2_place", "r2_d_place",
           "state_std", "effective_rank", "dead_features", "rank_accuracy"]


def episodes_of_the_dot(probe, name, episodes):
    """What `collect` would give, with the place of the dot and its change as quantities."""
    rng = np.random.default_rng(len(name))
    env = tiny.DotEnv(50, length=30)
    data = {"frames": [], "actions": [], "rewards": [], "quantities": []}
    for _ in range(episodes):
        frame, _ = env.reset(seed=int(rng.integers(999)))
        frames = [frame]
        quantities = [(env.place, 0.0)]
        actions = rng.uniform(-1, 1, (30, 1)).astype(np.float32)
        for action in actions:
            before = env.place
            frame, _, _, _, _ = env.step(action)
            frames.append(frame)
            quantities.append((env.place, env.place - before))
        data["frames"].append(np.array(frames))
        data["actions"].append(actions)
        data["rewards"].append(np.zeros(30))
        data["quantities"].append(np.array(quantities))
    data = {name: np.array(values) for name, values in data.items()}
    return {**data, "names": np.array(["place", "d_place"])}


@pytest.fixture
def tiny_probe(monkeypatch, tmp_path):
    monkeypatch.setattr(probing, "collect", episodes_of_the_dot)
    return probing.ProbeArgs(
        updates=10, episodes=12, replay_episodes=3, batch_size=4, aux_batch_size=2, num_filters=4,
        out=str(tmp_path), time_factor=2.0)


def made_up_rows(seeds, velocity=0.2):
    """Rows in which MOOSS reads more than Base by 0.1 and a little more with every seed."""
    rows = []
    for seed in seeds:
        for arm, value in (("base", 0.2), ("mooss", 0.3 + 0.01 * seed)):
            for point in range(probing.POINTS + 1):
                rows.append({
                    "arm": arm, "seed": seed, "point": point, "update": 10 * point, "seconds": 1.0,
                    "r2_position": value + 0.1 * seed, "r2_place": value + 0.1 * seed,
                    "r2_d_place": velocity, "state_std": 1.0, "effective_rank": 2.0,
                    "dead_features": 0.1, "rank_accuracy": 0.75})
    pixels = {"arm": "pixels", "seed": 0, "point": 0, "update": 0, "r2_position": 0.9,
              "r2_place": 0.9, "r2_d_place": 0.4}
    return [*rows, pixels]


# -------------------------------------------------------------------------------------------- probe
def test_a_ridge_reads_what_is_linear_and_nothing_else():
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(600, 8))
    fits = np.arange(600) < 400
    targets = np.stack([inputs @ np.arange(8.0) + 3, rng.normal(size=600)], axis=1)
    r2 = probing.held_out_r2(inputs, targets, fits)
    assert r2[0] > 0.999
    assert abs(r2[1]) < 0.1


def test_effective_rank_counts_directions():
    directions = np.linalg.qr(np.random.default_rng(0).normal(size=(200, 3)))[0]
    directions -= directions.mean(0)
    states = np.linalg.svd(directions, full_matrices=False)[0] @ np.eye(3, 10)
    assert probing.effective_rank(states) == pytest.approx(3, abs=0.01)


def test_stacks_and_quantities_of_the_probe_set_belong_together(tiny_probe):
    """The dot is where the quantity says, in the newest frame of the stack."""
    args = probing.script_args(tiny_probe, "base", 1)
    probe_set = probing.ProbeSet.of(args, episodes_of_the_dot(tiny_probe, "probe", 12))
    brightness = probe_set.stacks.float().mean(2)  # (N, frame_stack * C, W): over the height
    brightness -= brightness.min(2, keepdim=True).values
    columns = torch.arange(args.image_size)
    places = (brightness * columns).sum(2) / brightness.sum(2)  # (N, frame_stack * C)
    inside = np.abs(probe_set.quantities[:, 0]) < 0.6  # the whole dot is in the crop
    newest = np.corrcoef(places[inside, -1], probe_set.quantities[inside, 0])[0, 1]
    assert inside.sum() > 50 and newest > 0.99
    moved = places[inside, -1] - places[inside, -4]
    assert np.corrcoef(moved, probe_set.quantities[inside, 1])[0, 1] > 0.9
    assert probe_set.fits.sum() == 8 * probing.FRAMES
    assert len(probe_set.fits) == 12 * probing.FRAMES


def test_arms_of_a_seed_start_alike_and_see_the_same_transitions(tiny_probe, monkeypatch):
    drawn = {}
    sample = probing.PairedReplay.sample

    def recorded(self, count, length=1):
        rows = sample(self, count, length)
        drawn.setdefault((arm, length > 1), []).append(rows)
        return rows

    monkeypatch.setattr(probing.PairedReplay, "sample", recorded)
    first = {}
    for arm in ("base", "mooss", "cube_masks"):
        first[arm] = probing.run_arm(tiny_probe, arm, seed=3)[0]["r2_position"]
    assert len(set(first.values())) == 1
    found = {key: torch.cat(rows[:10]) for key, rows in drawn.items()}
    assert torch.equal(found["base", False], found["mooss", False])
    assert torch.equal(found["base", False], found["cube_masks", False])
    assert torch.equal(found["mooss", True], found["cube_masks", True])
    updates = found["mooss", False].view(10, -1)
    assert len(updates.unique(dim=0)) > 5  # not the same rows again and again


def test_a_draw_of_the_paired_replay_leaves_other_random_numbers_alone(tiny_probe):
    args = probing.script_args(tiny_probe, "mooss", 1)
    replay = probing.fill_replay(args, episodes_of_the_dot(tiny_probe, "replay0", 3), seed=1)
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    replay.sample(4)
    replay.sample(2, 16)
    assert torch.equal(torch.rand(3), expected)


def test_other_seeds_see_other_transitions(tiny_probe):
    args = probing.script_args(tiny_probe, "mooss", 1)
    data = episodes_of_the_dot(tiny_probe, "replay0", 3)
    rows = [probing.fill_replay(args, data, seed).sample(16) for seed in (1, 2)]
    assert not torch.equal(*rows)


def test_one_run_of_base_serves_two_arms(tiny_probe):
    rows = probing.run_arm(tiny_probe, "base", seed=1)
    updates = {
        arm: [row["update"] for row in rows if row["arm"] == arm]
        for arm in ("base", "base_same_time")
    }
    assert updates["base"] == list(range(11))
    assert updates["base_same_time"] == list(range(0, 21, 2))
    assert list(rows[0]) == COLUMNS


# ------------------------------------------------------------------------------------------- report
def test_the_report_pairs_seeds_and_shows_an_interval_only_for_three(tiny_probe, capsys):
    probing.report(tiny_probe, made_up_rows((1, 2, 3)))
    assert "+0.120 [+0.095, +0.145]" in capsys.readouterr().out
    probing.report(tiny_probe, made_up_rows((1, 2)))
    assert "| MOOSS | 2 | 0.465 | +0.115 |" in capsys.readouterr().out


def test_the_report_takes_differences_over_the_seeds_that_both_arms_have(tiny_probe, capsys):
    rows = [row for row in made_up_rows((1, 2, 3, 4))
            if not (row["arm"] == "base" and row["seed"] == 4)]
    probing.report(tiny_probe, rows)
    assert "| MOOSS | 4 | 0.575 | +0.120 [+0.095, +0.145] |" in capsys.readouterr().out


def test_the_endpoint_is_the_last_40_percent(tiny_probe, capsys):
    rows = made_up_rows((1, 2, 3))
    for row in rows:
        if row["arm"] == "mooss" and row["point"] <= 6:
            row["r2_position"] = 100.0
    probing.report(tiny_probe, rows)
    assert "+0.120 [+0.095, +0.145]" in capsys.readouterr().out


def test_the_report_says_how_many_of_the_planned_seeds_there_are(tiny_probe, capsys):
    probing.report(tiny_probe, made_up_rows((1, 2, 3)))
    said = capsys.readouterr().out
    assert "of the 12 planned seeds there are: untrained encoder 3; Base 3; MOOSS 3." in said
    probing.report(tiny_probe, made_up_rows(range(1, 13)))
    assert "Incomplete" not in capsys.readouterr().out


def test_the_report_shows_velocities_beside_what_pixels_allow(tiny_probe, capsys):
    probing.report(tiny_probe, made_up_rows((1, 2, 3)))
    said = capsys.readouterr().out
    row = r"\| velocity d_place \| 0.20 \| 0.20 \| 0.20 \| 0.40 \| \+0.000 \[.*\] \|"
    assert re.search(row, said)
    assert "velocity d_place is read with R2 0.20 at best" in said
    assert "on downsampled pixels it is 0.40" in said
    assert "reads positions with R2 0.900" in said


def test_table_and_picture_come_from_the_csv_alone(tmp_path, monkeypatch):
    """Without any data or training, whatever the flags of the run were; twice the same."""
    for name in ("collect", "run_arm"):
        monkeypatch.delattr(probing, name)
    path = tmp_path / "reacher-easy.csv"
    probing.write_rows(path, made_up_rows((2, 1, 3)))
    with open(path, newline="") as file:
        assert next(csv.reader(file)) == COLUMNS
    words = ["--report-only", "--out", str(tmp_path)]
    made = {}
    for more in ([], ["--updates", "7", "--time-factor", "9"]):
        assert probing.main(words + more) == 0
        picture = matplotlib.image.imread(tmp_path / "reacher-easy.png")
        made[str(more)] = (tmp_path / "reacher-easy.md").read_text(), picture
    (text, picture), (same_text, same_picture) = made.values()
    assert "+0.120 [+0.095, +0.145]" in text
    assert text == same_text
    assert np.array_equal(picture, same_picture)


def test_base_and_mooss_have_their_own_colours_in_the_picture(tiny_probe, tmp_path):
    probing.report(tiny_probe, made_up_rows((1, 2, 3)))
    picture = matplotlib.image.imread(tmp_path / "reacher-easy.png")[..., :3]
    for name in ("tab:gray", "tab:blue"):
        colour = np.array(matplotlib.colors.to_rgb(name))
        assert (np.abs(picture - colour).max(2) < 0.02).sum() > 500


def test_without_a_run_there_is_no_report(tmp_path):
    with pytest.raises(common.UsageError, match="holds no run"):
        probing.main(["--report-only", "--out", str(tmp_path)])


def test_what_is_in_the_csv_is_not_run_again(tiny_probe, tmp_path, monkeypatch):
    """The command of a stopped run, repeated, makes only the runs that are missing."""
    started = []

    class Pool:
        def __init__(self, *args, **kwargs):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def imap_unordered(self, function, runs):
            started.extend((arm, seed) for _, arm, seed in runs)
            return map(function, runs)

    monkeypatch.setattr(probing.multiprocessing.get_context("spawn").__class__, "Pool",
                        lambda self, *args, **kwargs: Pool())
    path = tmp_path / "reacher-easy.csv"
    probing.write_rows(path, made_up_rows((1,)))
    tiny_probe.seeds = 1
    rows = probing.read_rows(path)
    probing.train_arms(tiny_probe, path, rows)
    assert sorted(started) == [("cube_masks", 1), ("second_step", 1)]
    arms = {row["arm"] for row in probing.read_rows(path)}
    assert arms == {"base", "mooss", "cube_masks", "second_step", "pixels"}
