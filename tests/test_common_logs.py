"""What a run logs: tables, TensorBoard, Weights & Biases, what made it, and lines for people."""

import copy
import dataclasses
import io
import json
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

import mooss_common as common
import rainbow_mooss_atari as atari
import sac_mooss_dmc as dmc
from helpers import dot_run, tiny
from helpers.dot_run import BOTH, folder, run
from helpers.runs import Steps, rows, scalars

pytestmark = pytest.mark.usefixtures("dot_env", "dot_game")

# The steps at which an episode on DMC, a game on Atari ends.
ENDS = {dmc: [30, 60, 90, 120], atari: [33, 66]}


# ---------------------------------------------------------------------------------- tables in files
def test_the_first_row_decides_the_columns(tmp_path):
    path = tmp_path / "x.csv"
    common.append_row(path, {"a": 1, "b": 2})
    common.append_row(path, {"b": 3})
    with pytest.raises(common.UsageError, match="d, e is not a column of .*x.csv"):
        common.append_row(path, {"a": 4, "e": 5, "d": 6})
    assert path.read_bytes() == b"a,b\r\n1,2\r\n,3\r\n"


def logger_of(path, saved=None):
    return common.RunLogger(path, tiny.dmc_args(), 0, saved)


def test_rows_after_the_checkpoint_are_gone_after_a_resume(tmp_path):
    """They will be written again. A file that was restored twice is restored all the same."""
    path = tmp_path / "eval.csv"
    logger = logger_of(tmp_path)
    logger.evaluation(0, 0, [(1.5, 20)])
    saved = logger.state()
    kept = path.read_bytes()
    logger.evaluation(40, 5, [(2.5, 20)])
    for _ in range(2):
        again = logger_of(tmp_path, saved)
        assert path.read_bytes() == kept
    again.evaluation(80, 6, [(3.5, 20)])
    assert path.read_bytes().startswith(kept)
    assert [(row["step"], row["return"]) for row in rows(path)] == [("0", "1.5"), ("80", "3.5")]


def test_without_a_checkpoint_the_tables_begin_anew(tmp_path):
    logger_of(tmp_path).evaluation(0, 0, [(1.5, 20)])
    logger_of(tmp_path)
    assert (tmp_path / "eval.csv").read_bytes() == b""


@pytest.mark.parametrize("change", ["other", "shorter", "deleted"])
def test_a_table_that_was_changed_is_not_written_over(change, tmp_path):
    path = tmp_path / "eval.csv"
    logger = logger_of(tmp_path)
    logger.evaluation(0, 0, [(1.5, 20)])
    saved = logger.state()
    content = path.read_bytes()
    changed = {
        "other": content.replace(b"1.5", b"9.5"), "shorter": content[:-5], "deleted": b""}[change]
    path.write_bytes(changed)
    if change == "deleted":
        path.unlink()
    with pytest.raises(common.UsageError, match="eval.csv is not as the checkpoint left it"):
        logger_of(tmp_path, saved)
    assert path.read_bytes() == changed


# ------------------------------------------------------------------------------ training episodes
class Scores(gym.Wrapper):
    """Notes the sum of rewards of every episode (of a game on Atari) that has ended."""

    found = []
    score = 0.0

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        self.score += float(reward)
        if info.get("game_over", truncated):
            self.found.append(self.score)
            self.score = 0.0
        return obs, reward, terminated, truncated, info


@pytest.fixture
def scores(module, monkeypatch):
    """The returns of the training episodes of the run to come."""
    found = []
    make = module.make_env

    def make_noting(*args, **kwargs):
        env = Scores(make(*args, **kwargs))
        if env_count == 0:
            env.found = found
        return env

    env_count = 0

    def counting(*args, **kwargs):
        nonlocal env_count
        env = make_noting(*args, **kwargs)
        env_count += 1
        return env

    monkeypatch.setattr(module, "make_env", counting)
    return found


@BOTH
def test_a_return_is_logged_at_the_step_at_which_its_episode_ended(module, tmp_path, scores):
    run(module, tmp_path)
    logged = scalars(folder(module, tmp_path))["charts/episodic_return"]
    assert [step for step, _ in logged] == ENDS[module]
    assert [value for _, value in logged] == pytest.approx(scores, rel=1e-6)
    assert len(set(scores)) > 1


@BOTH
def test_a_return_stands_in_one_row_the_first_after_its_episode(module, tmp_path, scores):
    """On DMC that of the first episode waits for the first update; the last one has no row."""
    run(module, tmp_path)
    train = rows(folder(module, tmp_path) / "train.csv")
    steps = [int(row["step"]) for row in train]
    expected = dict.fromkeys(steps, "")
    for end, score in zip(ENDS[module], scores):
        later = [step for step in steps if step > end]
        if later:
            expected[later[0]] = f"{score:.6g}"
    assert {int(row["step"]): row["charts/episodic_return"] for row in train} == expected
    assert sum(value != "" for value in expected.values()) == {dmc: 3, atari: 2}[module]


@BOTH
def test_a_return_that_no_row_has_yet_survives_a_stop(module, tmp_path, monkeypatch):
    """The stop comes right after an episode, before the next row of the table."""
    run(module, tmp_path / "whole")
    with monkeypatch.context() as patch:
        end = {dmc: 30, atari: 33}[module]  # agent steps
        Steps().send("training", end, signal.SIGTERM).watch(patch, module)
        run(module, tmp_path / "parts")
    run(module, tmp_path / "parts", resume=True)
    whole, parts = [rows(folder(module, tmp_path / name) / "train.csv")
                    for name in ("whole", "parts")]
    assert whole == parts


# ------------------------------------------------------------------------------------- TensorBoard
def without_speed(found):
    """All scalars but the one that depends on the machine."""
    return {name: points for name, points in found.items() if name != "charts/SPS"}


@BOTH
def test_tensorboard_has_what_the_tables_have(module, tmp_path):
    run(module, tmp_path)
    path = folder(module, tmp_path)
    found = scalars(path)
    train = rows(path / "train.csv")
    keys = set(train[0]) - {"step", "update"}
    assert set(found) == keys | {"charts/SPS", "eval/return_mean", "eval/return_std"}
    for key in keys - {"charts/episodic_return"}:
        points = {(int(row["step"]), float(row[key])) for row in train}
        assert points == {(step, float(f"{value:.6g}")) for step, value in found[key]}, key
    evaluations = rows(path / "eval.csv")
    for step, mean in found["eval/return_mean"]:
        returns = [float(row["return"]) for row in evaluations if int(row["step"]) == step]
        assert len(returns) == 2
        assert mean == pytest.approx(np.mean(returns), rel=1e-5)


@BOTH
@pytest.mark.parametrize("when", ["an end", "between"])
def test_a_resumed_run_has_every_point_in_tensorboard_once(when, module, tmp_path, monkeypatch):
    """Also the return of an episode that ended exactly at the step of the checkpoint."""
    run(module, tmp_path / "whole")
    stop_at = {dmc: {"an end": 30, "between": 37}, atari: {"an end": 33, "between": 45}}
    with monkeypatch.context() as patch:
        Steps().send("training", stop_at[module][when], signal.SIGTERM).watch(patch, module)
        assert run(module, tmp_path / "parts") == 128 + signal.SIGTERM
    assert run(module, tmp_path / "parts", resume=True) == 0
    whole, parts = [without_speed(scalars(folder(module, tmp_path / name)))
                    for name in ("whole", "parts")]
    assert [step for step, _ in whole["charts/episodic_return"]] == ENDS[module]
    assert whole == parts


@BOTH
def test_tensorboard_shows_pictures_of_masks_and_of_the_similarity(module, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(module, tmp_path)
    events = EventAccumulator(str(folder(module, tmp_path)), size_guidance={"images": 0}).Reload()
    assert set(events.Tags()["images"]) == {
        "mooss/masked_observations", "mooss/query_key_similarity"}
    masked = events.Images("mooss/masked_observations")
    last = {dmc: 120, atari: 70}[module]
    assert [picture.step for picture in masked][-1] == last
    # Two rows of eight frames, each at least 160 pixels wide.
    side = {dmc: 8 * 21, atari: 6 * 28}[module]
    gap = 8
    assert (masked[0].height, masked[0].width) == (2 * (side + gap), 8 * (side + gap))
    # Eight queries by eight keys, 16 pixels each, and a margin for the axes.
    similarity = events.Images("mooss/query_key_similarity")[0]
    assert (similarity.height, similarity.width) == (136, 136)


@BOTH
def test_base_has_no_pictures(module, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(module, tmp_path, aux_weight=0.0)
    events = EventAccumulator(str(folder(module, tmp_path))).Reload()
    assert events.Tags()["images"] == []


@BOTH
def test_tensorboard_shows_the_flags_as_a_table(module, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(module, tmp_path, total_timesteps=40)
    events = EventAccumulator(str(folder(module, tmp_path))).Reload()
    text = events.Tensors("flags/text_summary")[0].tensor_proto.string_val[0].decode()
    batch_size = dot_run.FLAGS[module]["batch_size"]
    assert "| --mask-ratio | 0.5 |" in text
    assert f"| --batch-size | {batch_size} |" in text


def test_a_picture_of_masks_has_the_frames_above_what_is_left_of_them():
    """The newest frame of a stack is shown; the brightest pixel of all is white."""
    obs = torch.zeros(16, 9, 42, 42)
    for step in range(16):
        obs[step, -3:] = step / 60
    masked = obs.clone()
    masked[:, :, :, 21:] = 0
    picture = dmc.picture_of_masks(obs, masked, seq_len=16, channels=3)
    assert picture.shape == (16, 3, 176, 176)
    assert (picture[..., 168:] == 255).all() and (picture[..., 168:, :] == 255).all()
    picture = picture[..., :168, :168]
    shown = [round(255 * step / 15) for step in (0, 2, 4, 6, 8, 10, 12, 15)]
    for number, value in enumerate(shown):
        above, below = picture[number], picture[8 + number]
        assert above.unique().tolist() == pytest.approx([value], abs=1)
        assert torch.equal(below[:, :, :84], above[:, :, :84])
        assert (below[:, :, 84:] == 0).all()


def test_a_picture_of_the_similarity_is_the_mean_over_the_sequences_of_a_batch():
    """What lies between two sequences does not count."""
    within = torch.arange(16.0).view(4, 4)
    similarity = torch.full((8, 8), 99.0)
    similarity[:4, :4] = within - 1
    similarity[4:, 4:] = within + 1
    picture = dmc.picture_of_similarity(similarity, seq_len=4)
    assert picture.shape == (1, 1, 8 + 64, 8 + 64)
    cells = picture[0, 0, 8 + 8::16, 8 + 8::16]
    assert cells.tolist() == (255 * within / 15).byte().tolist()


def test_axes_of_a_picture_mark_every_fifth_cell():
    picture = common.heat_map(torch.rand(12, 12))[0, 0]
    marks = [8 + 16 * number + pixel for number in (0, 5, 10) for pixel in range(16)]
    assert picture[0].nonzero().flatten().tolist() == marks
    assert picture[:, 0].nonzero().flatten().tolist() == marks


@BOTH
def test_pictures_do_not_change_the_run(module):
    """The random streams go on as if nobody had looked."""
    if module is dmc:
        agent, replay = tiny.dmc_agent(tiny.dmc_args()), tiny.dmc_replay(tiny.dmc_args())
    else:
        agent, replay = tiny.atari_agent(tiny.atari_args()), tiny.atari_replay(tiny.atari_args())
    weights = copy.deepcopy(agent.state_dict())
    random_state = torch.get_rng_state()
    pictures = module.mooss_pictures(agent, replay, 3)
    assert all(picture.float().std() > 0 for picture in pictures.values())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(x, weights[name]) for name, x in agent.state_dict().items())
    assert all(parameter.grad is None for parameter in agent.parameters())


# --------------------------------------------------------------------------------- Weights & Biases
@BOTH
def test_weights_and_biases_keeps_its_run_over_a_resume(module, tmp_path, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    wandb.teardown()  # it remembers the folder of an earlier test
    asked = []
    init = wandb.init
    monkeypatch.setattr(wandb, "init", lambda **flags: asked.append(flags) or init(**flags))
    flags = dict(track=True, wandb_project="p", wandb_entity="e", wandb_group="g")
    with monkeypatch.context() as patch:
        Steps().send("training", 35, signal.SIGTERM).watch(patch, module)
        assert run(module, tmp_path, **flags) == 128 + signal.SIGTERM
    assert run(module, tmp_path, resume=True, **flags) == 0

    path = folder(module, tmp_path)
    run_id = (path / "wandb_id.txt").read_text()
    assert [(call["id"], call["resume"]) for call in asked] == 2 * [(run_id, "allow")]
    assert [asked[0][name] for name in ("project", "entity", "group")] == ["p", "e", "g"]
    assert asked[0]["config"]["seq_len"] == 8
    offline = list((tmp_path / "wandb").glob(f"offline-run-*-{run_id}"))
    assert offline
    # Below the run folder, W&B would take its own links to the events for more of them.
    assert not (path / "wandb").exists()
    assert all(any(run_folder.glob("*.wandb")) for run_folder in offline)


def test_a_refusal_of_weights_and_biases_is_one_sentence(tmp_path, monkeypatch):
    import wandb

    def refuse(**flags):
        raise wandb.errors.UsageError("no key")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(common.UsageError, match=r"refused \(no key\).*--resume"):
        run(dmc, tmp_path, track=True)


# ------------------------------------------------------------------------------------- what made it
@BOTH
def test_a_run_records_what_made_it(module, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["sac.py", "--exp-name", "a b"])
    run(module, tmp_path, total_timesteps=40)
    saved = json.loads((folder(module, tmp_path) / "args.json").read_text())
    made_by = saved["provenance"]
    assert made_by["command"] == "python sac.py --exp-name 'a b'"
    assert made_by["torch"] == torch.__version__
    assert made_by["python"].startswith("3.")
    assert {"numpy", "gymnasium", *module.PACKAGES} <= set(made_by)
    assert made_by["hardware"].endswith(f"{torch.get_num_threads()} threads")
    assert saved["source"] == f"{common.zlib.crc32(Path(module.__file__).read_bytes()):08x}"


def test_a_run_records_the_commit_of_its_script_and_whether_it_was_changed(tmp_path):
    def git(*words):
        name = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(
            ["git", *name, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def found():
        made_by = common.provenance(script, torch.device("cpu"), ())
        return made_by["commit"], made_by["dirty"]

    script = tmp_path / "variant.py"
    script.write_text("one = 1\n")
    git("init")
    git("add", "variant.py")
    git("commit", "-m", "one")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "new.txt").write_text("a file that git does not know")
    commit = git("rev-parse", "HEAD")
    assert found() == (commit, False)
    script.write_text("two = 2\n")
    assert found() == (commit, True)


def test_without_git_a_run_says_nothing_of_a_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    made_by = common.provenance(tmp_path / "variant.py", torch.device("cpu"), ())
    assert (made_by["commit"], made_by["dirty"]) == (None, False)


# ----------------------------------------------------------------------------------- first and last
@BOTH
def test_a_run_says_first_what_it_will_do_and_where(module, tmp_path, capsys):
    run(module, tmp_path, total_timesteps=40)
    first, second, third, fourth, *_ = capsys.readouterr().out.splitlines()
    env_id = dot_run.FLAGS[module]["env_id"]
    assert first == f"{env_id}, seed 1, preset paper -> {folder(module, tmp_path)}"
    assert re.fullmatch(r"device cpu, MUJOCO_GL=\w+, replay 0.00 GB on cpu", second)
    assert third.startswith("resolved: ")
    batch_size = dot_run.FLAGS[module]["batch_size"]
    assert f" batch_size={batch_size} " in third
    # The random phase has 20 steps on DMC, where a step is two env steps, and 30 on Atari.
    updates = {dmc: 0, atari: 20}[module]
    assert fourth == f"to do: {updates} updates, up to step 40"


@pytest.mark.parametrize("preset,advice", [
    ("paper", "; --preset laptop is made for a CPU"), ("laptop", "")])
@BOTH
def test_on_a_cpu_a_run_says_how_long_it_will_take(
        module, preset, advice, tmp_path, capsys, monkeypatch):
    """Eight observations take a second; the random streams go on as if nobody had tried."""
    if module is dmc:
        agent, replay = tiny.dmc_agent(tiny.dmc_args()), tiny.dmc_replay(tiny.dmc_args())
    else:
        agent, replay = tiny.atari_agent(tiny.atari_args()), tiny.atari_replay(tiny.atari_args())
    monkeypatch.setattr(common.timeit, "timeit", lambda function, number: number)
    agent.images_per_update = lambda: 100.0
    random_state = torch.get_rng_state()
    args = dataclasses.replace(agent.args, preset=preset)
    common.print_plan(args, tmp_path, agent, replay, (), 2880)
    assert torch.equal(torch.get_rng_state(), random_state)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"a rough guess: 10.0 hours on this CPU{advice}"


@BOTH
def test_a_run_says_last_what_to_type_next(module, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["my.py", "--exp-name", "a b"])
    with monkeypatch.context() as patch:
        Steps().send("training", 5, signal.SIGTERM).watch(patch, module)
        run(module, tmp_path)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "stopped; to go on: python my.py --exp-name 'a b' --resume"
    run(module, tmp_path, resume=True)
    *_, first, second, third = capsys.readouterr().out.splitlines()
    path = folder(module, tmp_path)
    assert first.startswith(f"finished: {path} has the logs and the agent")
    assert second == f"  python my.py --eval-only --checkpoint {path / 'agent.pt'}"
    assert third == f"  tensorboard --logdir {tmp_path}"


# ----------------------------------------------------------------------------------------- progress
class Terminal(io.StringIO):
    """Standard output that says whether it is a terminal."""

    def __init__(self, live):
        super().__init__()
        self.live = live

    def isatty(self):
        return self.live


@pytest.fixture
def progress(monkeypatch):
    """A function that makes a Progress whose time to show something has always come."""
    def make(live, total=1000, step=0):
        terminal = Terminal(live)
        monkeypatch.setattr(sys, "stdout", terminal)
        args = types.SimpleNamespace(total_timesteps=total, eval_episodes=10)
        made = common.Progress(args, step, types.SimpleNamespace(signal=None))
        assert made.bar.mininterval == (0.5 if live else 30)
        made.bar.mininterval = 0
        return made, terminal

    return make


def test_elsewhere_than_on_a_terminal_progress_is_a_plain_line_every_half_minute(
        progress):
    made, terminal = progress(live=False)
    made.bar.mininterval = 30
    began = time.time()
    for seconds in (29, 31, 59, 62):
        made.bar._time = lambda seconds=seconds: began + seconds
        values = {"critic": torch.tensor(1.25), "mooss": 0.5, "return": None}
        made.show(10 * seconds, seconds, values)
    lines = terminal.getvalue().splitlines()
    assert len(lines) == 2
    first = r" 31% 310/1,000  ETA [\d:?]+, update 31  critic 1.25  mooss 0.5"
    assert re.fullmatch(first, lines[0])
    assert "\r" not in terminal.getvalue()


def test_on_a_terminal_progress_is_one_line_that_lives(progress):
    made, terminal = progress(live=True)
    for step in (100, 200):
        made.show(step, step // 2, {"critic": 1.25})
    made.bar.write("a line of its own")
    made.bar.close()
    text = terminal.getvalue()
    assert "\r 10% 100/1,000  ETA 00:00, update 50  critic 1.25" in text
    assert "\r 20% 200/1,000  ETA 00:00, update 100  critic 1.25" in text
    # Only what is said ends a line.
    assert re.findall(r"([^\r\n]*)\n", text) == ["a line of its own"]


def test_values_are_read_from_the_device_only_when_they_are_shown(progress):
    class OnTheDevice:
        read = 0

        def __float__(self):
            self.read += 1
            return 1.0

    made, terminal = progress(live=False)
    value = OnTheDevice()
    made.bar.mininterval = 1000
    made.show(10, 5, {"critic": value})
    assert (value.read, terminal.getvalue()) == (0, "")
    made.bar.mininterval = 0
    made.show(10, 5, {"critic": value})
    assert value.read == 1


def test_before_the_first_update_no_time_of_arrival_is_guessed(progress):
    made, terminal = progress(live=False)
    made.show(100, 0, {})
    assert terminal.getvalue() == " 10% 100/1,000  ETA ?, update 0\n"


@pytest.mark.parametrize("live", [True, False])
def test_the_last_action_may_go_beyond_the_end(live, progress):
    """100 env steps are 13 actions that are taken eight times."""
    made, terminal = progress(live=live, total=100, step=96)
    made.show(104, 13, {})
    assert "100% " in terminal.getvalue()


def test_an_evaluation_says_how_many_of_its_episodes_are_done_and_goes_on_until_a_signal(progress):
    made, terminal = progress(live=False)
    assert made.keep_going(3)
    assert terminal.getvalue() == "evaluating 3/10    0% 0/1,000  ETA ?\n"
    made.stop.signal = signal.SIGTERM
    assert not made.keep_going(3)
    made.show(100, 0, {})
    assert terminal.getvalue().splitlines()[-1] == " 10% 100/1,000  ETA ?, update 0"


def test_things_are_due_at_the_first_step_at_or_after_each_multiple():
    """With an action repeat of 8, steps are multiples of 8."""
    assert [step for step in range(0, 60, 8) if common.due(step, 20, 8)] == [0, 24, 40]
    assert [step for step in range(9) if common.due(step, 4)] == [0, 4, 8]
    assert not any(common.due(step, 0) for step in range(9))
