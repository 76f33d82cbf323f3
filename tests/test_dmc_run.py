"""Whole runs of the DMC script through `main(args)`: what they leave, repeat, resume and refuse."""

import json
import signal

import numpy as np
import pytest
import torch

import mooss_common as common
import sac_mooss_dmc as dmc
from helpers import dot_run, tiny
from helpers.runs import Steps, assert_equal, assert_same_run, load, rows, saved_run

# A run of 60 agent steps of two env steps, 20 of them random; its replay wraps. Its evaluations
# come after 0, 40, 80 and 120 env steps and have two episodes of 15 agent steps.
WRAPS = dict(buffer_size=40)

pytestmark = pytest.mark.usefixtures("dot_env")


def run(root, **changes):
    return dot_run.run(dmc, root, **changes)


def folder(root, **parts):
    return dot_run.folder(dmc, root, **parts)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of the run that was never stopped; nobody writes to it."""
    root = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dmc, "make_env", tiny.make_dot_env)
        assert run(root, **WRAPS) == 0
    return folder(root)


# ------------------------------------------------------------------------------ what a run leaves
@pytest.mark.quick
def test_a_run_leaves_these_files_and_no_others(tmp_path):
    assert run(tmp_path, capture_video=True) == 0
    names = {path.name for path in folder(tmp_path).iterdir()}
    events = {name for name in names if name.startswith("events.out.tfevents.")}
    assert len(events) == 1
    assert names - events == {
        ".lock", "agent.pt", "args.json", "checkpoint.pt", "checkpoint_previous.pt", "eval.csv",
        "replay", "train.csv", "videos"}
    videos = {path.name for path in (folder(tmp_path) / "videos").iterdir()}
    assert videos == {f"step_{step:09d}.mp4" for step in (0, 40, 80, 120)}


def test_arguments_are_saved_with_every_preset_filled_in(whole):
    saved = json.loads((whole / "args.json").read_text())
    assert (saved["batch_size"], saved["rl_lr"], saved["cube_len"]) == (6, 0.001, 4)
    assert saved["script"] == "sac_mooss_dmc"


def test_evaluations_have_a_row_for_each_episode(whole):
    found = [[int(row[name]) for name in ("step", "update", "episode", "length")]
             for row in rows(whole / "eval.csv")]
    assert found == [[step, update, episode, 15]
                     for step, update in ((0, 0), (40, 0), (80, 20), (120, 40))
                     for episode in (0, 1)]


def test_training_has_a_row_every_few_updates_with_every_metric(whole):
    train = rows(whole / "train.csv")
    assert [int(row["update"]) for row in train] == list(range(1, 40, 4))
    assert [int(row["step"]) for row in train] == list(range(42, 120, 8))
    assert list(train[0])[2:] == [
        "charts/episodic_return", "losses/critic", "charts/learning_rate", "sac/q1", "sac/q2",
        "sac/target_q", "encoder/state_std", "encoder/dead_features", "mooss/lr",
        "mooss/grad_norm", "losses/mooss", "mooss/mask_fraction", "mooss/top1_accuracy",
        "mooss/rank_accuracy", "losses/actor", "losses/alpha", "sac/entropy", "sac/alpha"]
    for row in train:
        empty = {name for name, value in row.items() if value == ""}
        assert empty <= {"charts/episodic_return"}
    assert {float(row["mooss/mask_fraction"]) for row in train} == {0.5}
    assert len({row["losses/mooss"] for row in train}) == len(train)


def test_every_weight_has_moved_from_where_it_began(whole):
    state = load(whole / "checkpoint.pt")
    assert (state["step"], state["counters"]["update"]) == (120, 40)
    torch.manual_seed(1)
    untrained = dmc.Agent(dmc.Args(**state["args"]), *state["agent_shape"], tiny.CPU)
    before = untrained.state_dict()
    assert before.keys() == state["agent"].keys()
    assert [name for name, x in before.items() if torch.equal(x, state["agent"][name])] == []


def test_a_video_shows_the_first_episode(tmp_path):
    import imageio

    run(tmp_path, capture_video=True, total_timesteps=40)
    film = imageio.mimread(folder(tmp_path) / "videos" / "step_000000000.mp4")
    assert len(film) == 15
    assert film[0].shape == (24, 24, 3)
    assert np.ptp(film[0]) > 100  # the dot on its ground


def test_scores_of_the_paper_stand_beside_those_of_an_evaluation(tmp_path, capsys):
    run(tmp_path, total_timesteps=40)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [line.partition(":")[0] for line in said] == ["step 0", "step 40"]
    for line in said:
        assert line.endswith("over 2 episodes (the paper at 100,000 steps: MOOSS 873, Base 784)")


# ----------------------------------------------------------------------------- the same run again
def test_the_same_seed_gives_the_same_run(tmp_path, whole):
    run(tmp_path, **WRAPS)
    assert_same_run(whole, folder(tmp_path))


def test_another_seed_gives_another_run(tmp_path, whole):
    run(tmp_path, seed=2, **WRAPS)
    other = folder(tmp_path, seed=2)
    assert rows(other / "train.csv") != rows(whole / "train.csv")
    assert rows(other / "eval.csv") != rows(whole / "eval.csv")


@pytest.mark.quick
@pytest.mark.parametrize("stop_at,planned", [(7, 120), (33, 120), (45, 120), (33, 200)])
def test_a_resumed_run_equals_one_that_was_never_stopped(
        stop_at, planned, tmp_path, monkeypatch, whole):
    """A signal comes within an episode: in the random phase, while it learns, with a full replay.

    A run that was planned to be longer, and is finished shorter, is no other run.
    """
    with monkeypatch.context() as patch:
        Steps().send("training", stop_at, signal.SIGTERM).watch(patch, dmc)
        assert run(tmp_path, total_timesteps=planned, **WRAPS) == 128 + signal.SIGTERM
    assert load(folder(tmp_path) / "checkpoint.pt")["counters"]["step"] == 2 * stop_at
    assert run(tmp_path, resume=True, **WRAPS) == 0
    assert_same_run(whole, folder(tmp_path))


def test_a_finished_run_can_be_made_longer(tmp_path, whole):
    run(tmp_path, total_timesteps=80, **WRAPS)
    assert run(tmp_path, resume=True, **WRAPS) == 0
    assert_same_run(whole, folder(tmp_path))


@pytest.mark.parametrize("total", [120, 40], ids=["the same length", "shorter"])
def test_a_finished_run_that_is_resumed_does_nothing(total, tmp_path, monkeypatch):
    run(tmp_path)
    before = saved_run(folder(tmp_path))
    tables = [(folder(tmp_path) / name).read_bytes() for name in ("train.csv", "eval.csv")]
    with monkeypatch.context() as patch:
        steps = Steps().watch(patch, dmc)
        replayed = len(before["counters"]["actions"])
        assert run(tmp_path, resume=True, total_timesteps=total) == 0
    assert (steps.training, steps.evaluation) == (replayed, 0)
    assert_equal(saved_run(folder(tmp_path)), before)
    assert tables == [(folder(tmp_path) / name).read_bytes() for name in ("train.csv", "eval.csv")]


# --------------------------------------------------------------------------------- a saved agent
@pytest.mark.parametrize("file", ["checkpoint.pt", "agent.pt"])
def test_a_saved_agent_loads_in_three_lines_and_acts(file, whole):
    from sac_mooss_dmc import load_agent
    agent, step = load_agent(whole / file)
    obs, _ = tiny.make_dot_env(agent.args, None).reset(seed=0)
    action = agent.act(obs, deterministic=True)
    assert step == 120
    assert action.shape == (1,)

    trained = load(whole / "checkpoint.pt")
    twin = tiny.dmc_agent(dmc.Args(**trained["args"]), seed=5)
    assert twin.act(obs, deterministic=True) != action
    twin.load_state_dict(trained["agent"])
    assert twin.act(obs, deterministic=True) == action


@pytest.mark.parametrize("file", ["checkpoint.pt", "agent.pt"])
def test_eval_only_repeats_the_final_evaluation(file, tmp_path):
    run(tmp_path, **WRAPS)
    path = folder(tmp_path)
    final = [row["return"] for row in rows(path / "eval.csv")][-2:]
    checkpoint = str(path / file)
    args = dmc.Args(eval_only=True, checkpoint=checkpoint, eval_episodes=2, device="cpu")
    for times in (1, 2):
        assert dmc.main(args) == 0
        table = rows(path / "eval_only.csv")
        assert [row["return"] for row in table] == times * final
        assert {(row["step"], row["length"]) for row in table} == {("120", "15")}
    assert (path / "videos" / "eval_only_120.mp4").stat().st_size > 0


def test_eval_only_with_another_seed_plays_other_episodes(tmp_path):
    run(tmp_path, total_timesteps=40)
    path = folder(tmp_path)
    checkpoint = str(path / "agent.pt")
    for seed in (1, 2):
        args = dmc.Args(
            eval_only=True, checkpoint=checkpoint, seed=seed, eval_episodes=3, device="cpu")
        assert dmc.main(args) == 0
    returns = [row["return"] for row in rows(path / "eval_only.csv")]
    assert len(set(returns)) == 6


# -------------------------------------------------------------------------------------- refusals
def test_a_replay_that_cannot_fit_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(common.UsageError, match="GB are free on cpu: choose a smaller --buffer"):
        run(tmp_path, buffer_size=10**8)
    assert not any(tmp_path.iterdir())
