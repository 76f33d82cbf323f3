"""Whole runs of the Atari script: what they leave, repeat, resume and refuse."""

import dataclasses
import json
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

import mooss_common as common
import rainbow_mooss_atari as atari
import sac_mooss_dmc as dmc
from helpers import dot_run, flags, tiny
from helpers.runs import Steps, assert_same_run, load, rows

# A run of 70 agent steps, 30 of them random, with two updates each after that; its replay wraps.
# Its evaluations come after 0, 30, 60 and 70 steps and have two games of three lives of 11 steps.
WRAPS = dict(buffer_size=35)


def run(root, **changes):
    return dot_run.run(atari, root, **changes)


def folder(root, **parts):
    return dot_run.folder(atari, root, **parts)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of the run that was never stopped; nobody writes to it."""
    root = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(atari, "make_env", tiny.make_dot_game)
        assert run(root, **WRAPS) == 0
    return folder(root)


# ------------------------------------------------------------------------------ what a run leaves
@pytest.mark.quick
def test_a_run_leaves_these_files_and_no_others(tmp_path, dot_game):
    assert run(tmp_path, capture_video=True) == 0
    names = {path.name for path in folder(tmp_path).iterdir()}
    events = {name for name in names if name.startswith("events.out.tfevents.")}
    assert len(events) == 1
    assert names - events == {
        ".lock", "agent.pt", "args.json", "checkpoint.pt", "checkpoint_previous.pt", "eval.csv",
        "replay", "train.csv", "videos"}
    videos = {path.name for path in (folder(tmp_path) / "videos").iterdir()}
    assert videos == {f"step_{step:09d}.mp4" for step in (0, 30, 60, 70)}


@pytest.mark.parametrize("device,sizes", [("cpu", {1, 2}), ("cuda", {2})])
def test_an_evaluation_on_a_gpu_keeps_the_shape_of_its_batch(
        device, sizes, monkeypatch, dot_game):
    """Of two games one ends first; cuDNN would tune itself anew for a smaller batch."""
    args = tiny.atari_args(eval_episodes=2)
    agent = tiny.atari_agent(args)
    seen = []
    act = agent.act
    monkeypatch.setattr(agent, "act", lambda obs: seen.append(len(obs)) or act(obs))
    games = [tiny.make_dot_game(args, None, training=False) for _ in range(2)]
    step = games[1].step

    def ended(action):  # after its first step
        return *step(action)[:2], True, False, {}

    monkeypatch.setattr(games[1], "step", ended)
    monkeypatch.setattr(atari, "make_env", lambda *_, **__: games.pop(0))
    assert len(atari.evaluate(agent, args, torch.device(device), 0, lambda done: True)) == 2
    assert set(seen) == sizes


def test_a_signal_while_the_games_of_an_evaluation_begin_stops_it(monkeypatch, dot_game):
    """A hundred of them take a while."""
    begun = []
    make_env = atari.make_env
    monkeypatch.setattr(atari, "make_env", lambda *words, **more: begun.append(words) or make_env(
        *words, **more))
    args = tiny.atari_args(eval_episodes=100)
    agent = tiny.atari_agent(args)
    cpu = torch.device("cpu")
    assert atari.evaluate(agent, args, cpu, 0, lambda done: len(begun) < 3) is None
    assert len(begun) == 3


def test_arguments_are_saved_with_every_preset_filled_in(whole):
    saved = json.loads((whole / "args.json").read_text())
    assert (saved["batch_size"], saved["mask_ratio"], saved["multi_step"]) == (4, 0.5, 3)
    assert saved["script"] == "rainbow_mooss_atari"


def test_evaluations_are_whole_games_with_their_unclipped_scores(whole):
    """In training a lost life ends an episode, and a reward of 2.5 counts as 1."""
    evaluations = rows(whole / "eval.csv")
    found = [[int(row[name]) for name in ("step", "update", "episode", "length")]
             for row in evaluations]
    assert found == [[step, update, episode, 33]
                     for step, update in ((0, 0), (30, 0), (60, 60), (70, 80))
                     for episode in (0, 1)]
    scores = {float(row["return"]) for row in evaluations}
    assert {score % 2.5 for score in scores} == {0.0}
    assert max(scores) > 0


def test_training_has_a_row_every_few_updates_with_every_metric(whole):
    train = rows(whole / "train.csv")
    assert [int(row["update"]) for row in train] == list(range(1, 80, 4))
    assert [int(row["step"]) for row in train] == list(range(31, 71, 2))
    assert list(train[0])[2:] == [
        "charts/episodic_return", "losses/rl", "rainbow/q", "rainbow/priority",
        "rainbow/grad_norm", "mooss/grad_norm", "rainbow/is_exponent", "charts/learning_rate",
        "encoder/state_std", "encoder/dead_features", "losses/mooss", "mooss/mask_fraction",
        "mooss/valid_fraction", "mooss/top1_accuracy", "mooss/rank_accuracy"]
    for row in train:
        empty = {name for name, value in row.items() if value == ""}
        assert empty <= {"charts/episodic_return"}
    assert len({row["losses/mooss"] for row in train}) == len(train)


def test_the_importance_exponent_rises_over_the_learning_part_of_the_run(whole):
    exponents = [float(row["rainbow/is_exponent"]) for row in rows(whole / "train.csv")]
    assert exponents[0] == 0.4
    # The 20th row is of the 39th of 40 learning steps.
    assert exponents[-1] == pytest.approx(0.4 + 0.6 * 38 / 40)
    assert np.diff(exponents) == pytest.approx(0.6 * 2 / 40)


def test_every_weight_has_moved_from_where_it_began(whole):
    state = load(whole / "checkpoint.pt")
    assert (state["step"], state["counters"]["update"]) == (70, 80)
    torch.manual_seed(1)
    untrained = atari.Agent(atari.Args(**state["args"]), *state["agent_shape"], tiny.CPU)
    before = untrained.state_dict()
    assert before.keys() == state["agent"].keys()
    assert [name for name, x in before.items() if torch.equal(x, state["agent"][name])] == []


def test_a_video_shows_the_first_game_at_twice_its_size(tmp_path, dot_game):
    import imageio

    run(tmp_path, capture_video=True, total_timesteps=30)
    film = imageio.mimread(folder(tmp_path) / "videos" / "step_000000000.mp4")
    assert len(film) == 33
    assert film[0].shape == (56, 56, 3)
    assert np.ptp(film[0]) > 100  # the dot on its ground


def test_scores_of_the_paper_stand_beside_those_of_an_evaluation(tmp_path, dot_game, capsys):
    run(tmp_path, total_timesteps=30)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    scores = [float(row["return"]) for row in rows(folder(tmp_path) / "eval.csv")]
    assert len(said) == 2
    for line, score in zip(said, (np.mean(scores[:2]), np.mean(scores[2:]))):
        # Breakout: a random policy scores 1.7, a human 30.5.
        assert f"human-normalised {(score - 1.7) / 28.8:.3f};" in line
        assert line.endswith("the paper: MOOSS 16.8, Base 16.7, Random 1.7, Human 30.5")


# ----------------------------------------------------------------------------- the same run again
def test_the_same_seed_gives_the_same_run(tmp_path, dot_game, whole):
    run(tmp_path, **WRAPS)
    assert_same_run(whole, folder(tmp_path))


def test_another_seed_gives_another_run(tmp_path, dot_game, whole):
    run(tmp_path, seed=2, **WRAPS)
    other = folder(tmp_path, seed=2)
    assert rows(other / "train.csv") != rows(whole / "train.csv")
    assert rows(other / "eval.csv") != rows(whole / "eval.csv")


@pytest.mark.quick
@pytest.mark.parametrize("stop_at", [5, 22, 37, 50])
def test_a_resumed_run_equals_one_that_was_never_stopped(
        stop_at, tmp_path, monkeypatch, dot_game, whole):
    """A signal comes within a life in the random phase, at the loss of a life, while it learns in
    the second game, with a full replay."""
    with monkeypatch.context() as patch:
        Steps().send("training", stop_at, signal.SIGUSR1).watch(patch, atari)
        assert run(tmp_path, **WRAPS) == 128 + signal.SIGUSR1
    assert load(folder(tmp_path) / "checkpoint.pt")["step"] == stop_at
    assert run(tmp_path, resume=True, **WRAPS) == 0
    assert_same_run(whole, folder(tmp_path))


@pytest.mark.parametrize("total", [60, 90])
def test_another_length_is_another_run(total, tmp_path, dot_game):
    """The importance exponent depends on it."""
    run(tmp_path)
    with pytest.raises(common.UsageError, match=f"total_timesteps was 70, is {total}"):
        run(tmp_path, total_timesteps=total, resume=True)


def test_a_finished_run_that_is_resumed_does_nothing(tmp_path, monkeypatch, dot_game, whole):
    run(tmp_path, **WRAPS)
    with monkeypatch.context() as patch:
        steps = Steps().watch(patch, atari)
        assert run(tmp_path, resume=True, **WRAPS) == 0
    # Of its third game it had played four steps; they are played again, and no other.
    assert (steps.training, steps.evaluation) == (70 - 2 * 33, 0)
    assert_same_run(whole, folder(tmp_path))


# ------------------------------------------------------------------------------------ exploration
def random_actions(root, monkeypatch, **changes):
    """The share of the actions after the random phase that no agent was asked for."""
    asked = []
    act = atari.Agent.act

    def recorded(agent, obs, noisy=False):
        asked.append(noisy)
        return act(agent, obs, noisy)

    monkeypatch.setattr(atari.Agent, "act", recorded)
    monkeypatch.setattr(atari, "evaluate", lambda *args, **kwargs: [(0.0, 1)])
    # It acts to see how long that takes.
    monkeypatch.setattr(common, "print_plan", lambda *args: None)
    assert run(root, **changes) == 0
    assert set(asked) == {changes.get("noisy", True)}
    learning_steps = changes.get("total_timesteps", 70) - 30
    return 1 - len(asked) / learning_steps


def test_noisy_layers_explore_without_random_actions(tmp_path, monkeypatch, dot_game):
    assert random_actions(tmp_path, monkeypatch) == 0


def test_epsilon_greedy_explores_without_noise(tmp_path, monkeypatch, dot_game):
    share = random_actions(
        tmp_path, monkeypatch, noisy=False, epsilon=0.25, total_timesteps=430, replay_period=50)
    assert 0.15 < share < 0.35


@pytest.mark.parametrize("period,count", [(1, 40), (3, 14)])
def test_a_step_is_act_update_environment_store(period, count, tmp_path, monkeypatch, dot_game):
    """On CUDA the updates compute while the emulator runs; random steps come before.

    With a replay period of 3, the first and then every third of the 40 steps after them learns.
    """
    monkeypatch.setattr(atari, "evaluate", lambda *args, **kwargs: [(0.0, 1)])
    # It acts to see how long that takes.
    monkeypatch.setattr(common, "print_plan", lambda *args: None)
    events = []

    def record(owner, name):
        function = getattr(owner, name)

        def call(*args, **kwargs):
            events.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    record(atari.Agent, "act")
    record(atari.Agent, "update")
    record(tiny.DotGame, "step")
    record(atari.SequenceReplay, "add")
    assert run(tmp_path, replay_period=period) == 0
    expected = 30 * ["step", "add"]
    for step in range(40):
        expected += ["act", *(2 * ["update"] if step % period == 0 else []), "step", "add"]
    assert events == expected
    assert events.count("update") == 2 * count


# --------------------------------------------------------------------------------- a saved agent
@pytest.mark.parametrize("file", ["checkpoint.pt", "agent.pt"])
def test_a_saved_agent_loads_in_three_lines_and_acts(file, whole):
    from rainbow_mooss_atari import load_agent
    agent, step = load_agent(whole / file)
    obs, _ = tiny.make_dot_game(agent.args, None).reset(seed=0)
    actions = agent.act(obs[None])
    assert step == 70
    assert actions.shape == (1,)
    trained = load(whole / "checkpoint.pt")["agent"]
    left_out = () if file == "checkpoint.pt" else agent.unused
    kept = {name: x for name, x in agent.state_dict().items() if not name.startswith(left_out)}
    assert {"online.convs.0.weight", "target.convs.0.weight"} <= kept.keys()
    assert all(torch.equal(x, trained[name]) for name, x in kept.items())


def test_the_agent_that_is_shipped_plays_as_the_readme_says():
    """955 over 20 games; random actions get 11.5."""
    path = Path(atari.__file__).parent / "benchmark" / "results" / "agents" / "RoadRunner.pt"
    agent, step = atari.load_agent(path)
    args = dataclasses.replace(agent.args, eval_episodes=3)
    games = atari.evaluate(agent, args, agent.device, step, lambda done: True)
    assert step == 5000
    assert 800 < np.mean([score for score, _ in games]) < 1100


@pytest.mark.parametrize("file", ["checkpoint.pt", "agent.pt"])
def test_eval_only_repeats_the_final_evaluation(file, tmp_path, dot_game):
    run(tmp_path, **WRAPS)
    path = folder(tmp_path)
    final = [row["return"] for row in rows(path / "eval.csv")][-2:]
    args = atari.Args(
        eval_only=True, checkpoint=str(path / file), eval_episodes=2, device="cpu")
    for times in (1, 2):
        assert atari.main(args) == 0
        table = rows(path / "eval_only.csv")
        assert [row["return"] for row in table] == times * final
        assert {(row["step"], row["length"]) for row in table} == {("70", "33")}
    assert (path / "videos" / "eval_only_70.mp4").stat().st_size > 0


def test_eval_only_takes_its_share_of_random_actions_from_the_command_line(tmp_path, dot_game):
    run(tmp_path, total_timesteps=30)
    path = folder(tmp_path)
    for epsilon in (0.0, 1.0):
        args = atari.Args(
            eval_only=True, checkpoint=str(path / "agent.pt"), eval_episodes=4,
            eval_epsilon=epsilon, device="cpu")
        assert atari.main(args) == 0
    returns = [row["return"] for row in rows(path / "eval_only.csv")]
    assert returns[:4] != returns[4:]


@pytest.mark.parametrize("file", ["checkpoint.pt", "agent.pt"])
def test_an_agent_of_the_other_script_is_refused(file, whole):
    with pytest.raises(common.UsageError, match="was written by rainbow_mooss_atari.py: use that"):
        dmc.load_agent(whole / file)


# ---------------------------------------------------------------------------------- the real game
def test_end_to_end_on_a_real_game(tmp_path):
    words = (
        "--env-id ALE/Breakout-v5 --total-timesteps 150 --min-replay 120 --batch-size 4 "
        "--channels 4 8 8 --hidden-units 16 --eval-episodes 2 --max-frames 2000 "
        "--buffer-size 1000 --log-every 10 --device cpu").split()
    done = flags.script(atari, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    path = tmp_path / "runs" / "Breakout__mooss__s1"
    evaluations = rows(path / "eval.csv")
    assert [(row["step"], row["update"]) for row in evaluations] == 2 * [("150", "60")]
    train = rows(path / "train.csv")
    assert [row["update"] for row in train] == ["1", "11", "21", "31", "41", "51"]
    assert all(np.isfinite(float(row["losses/mooss"])) for row in train)
    assert "human-normalised" in done.stdout

    again = flags.script(atari, *words, cwd=tmp_path)
    assert again.returncode == 2
    assert "exists" in again.stderr
