"""The linear probe: it finds what is linear, pairs its arms, and one run of Base serves two of them."""

import sys

import numpy as np
import pytest
import torch

from conftest import ROOT, DotEnv

sys.path.insert(0, str(ROOT / "benchmark"))
import probe as probing


@pytest.fixture
def tiny_probe(monkeypatch, tmp_path):
    """A probe whose episodes come from the dot task, whose one quantity is where the dot is."""
    def collect(probe, name, episodes):
        rng, env = np.random.default_rng(len(name)), DotEnv(50, length=30)
        data = {"frames": [], "actions": [], "rewards": [], "quantities": []}
        for _ in range(episodes):
            frames, places, actions = [env.reset(seed=int(rng.integers(999)))[0]], [env.place], []
            for _ in range(30):
                actions.append(rng.uniform(-1, 1, 1).astype(np.float32))
                frames.append(env.step(actions[-1])[0])
                places.append(env.place)
            for column, values in zip(data, (frames, actions, np.zeros(30), places)):
                data[column].append(np.array(values))
        data = {column: np.array(values) for column, values in data.items()}
        return {**data, "quantities": data["quantities"][..., None], "names": np.array(["place"])}

    monkeypatch.setattr(probing, "collect", collect)
    return probing.ProbeArgs(updates=20, episodes=12, replay_episodes=3, batch_size=4, aux_batch_size=2, num_filters=4,
                             out=str(tmp_path), time_factor=1.5)


def test_a_ridge_reads_what_is_linear_and_nothing_else():
    rng = np.random.default_rng(0)
    inputs, fits = rng.normal(size=(600, 8)), np.arange(600) < 400
    targets = np.stack([inputs @ np.arange(8.0) + 3, rng.normal(size=600)], axis=1)
    r2 = probing.held_out_r2(inputs, targets, fits)
    assert r2[0] > 0.999 and abs(r2[1]) < 0.1


def test_effective_rank_counts_directions():
    directions = np.linalg.qr(np.random.default_rng(0).normal(size=(200, 3)))[0]
    directions -= directions.mean(0)
    states = np.linalg.svd(directions, full_matrices=False)[0] @ np.eye(3, 10)
    assert probing.effective_rank(states) == pytest.approx(3, abs=0.01)


def test_arms_of_a_seed_start_alike_and_see_the_same_transitions(tiny_probe, monkeypatch):
    drawn = {}
    sample = probing.PairedReplay.sample_rows

    def recorded(self, count, length=1):
        rows = sample(self, count, length)
        if length == 1:
            drawn.setdefault(arm, []).append(rows)
        return rows

    monkeypatch.setattr(probing.PairedReplay, "sample_rows", recorded)
    first = {}
    for arm in ("base", "mooss", "cube_masks"):
        rows = probing.run_arm(tiny_probe, arm, seed=3)
        first[arm] = rows[0]["r2_position"]
    assert len(set(first.values())) == 1
    transitions = {arm: torch.cat(rows[:20]) for arm, rows in drawn.items()}
    assert torch.equal(transitions["base"], transitions["mooss"])
    assert torch.equal(transitions["base"], transitions["cube_masks"])


def test_one_run_of_base_serves_two_arms(tiny_probe):
    rows = probing.run_arm(tiny_probe, "base", seed=1)
    updates = {arm: [row["update"] for row in rows if row["arm"] == arm] for arm in ("base", "base_same_time")}
    assert updates["base"] == list(range(0, 21, 2))
    assert updates["base_same_time"] == list(range(0, 31, 3))


def test_the_report_pairs_seeds_and_shows_an_interval_only_for_three(tiny_probe, capsys):
    rows = [{"arm": arm, "seed": seed, "point": point, "r2_position": value + 0.1 * seed, "r2_place": 0.5,
             "state_std": 1.0, "effective_rank": 2.0}
            for seed in (1, 2, 3) for arm, value in (("base", 0.2), ("mooss", 0.3 + 0.01 * seed))
            for point in range(11)]
    probing.report(tiny_probe, rows)
    assert "+0.120 [+0.095, +0.145]" in capsys.readouterr().out
    probing.report(tiny_probe, [row for row in rows if row["seed"] < 3])
    assert "| MOOSS | 2 | 0.465 | +0.115 |" in capsys.readouterr().out
