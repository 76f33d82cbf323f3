"""Whole runs through `main(args)` and through the command line: what they leave, repeat, resume and refuse."""

import csv
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

import mooss_common as common
import sac_mooss_dmc as dmc
from conftest import ROOT, DotEnv, TINY, make_dot_env

SHORT = dict(TINY, total_timesteps=120, eval_every=40, checkpoint_every=40, log_every=4)  # 60 agent steps, 40 updates


def run(run_root, **changes):
    return dmc.main(dmc.Args(**{**SHORT, "run_root": str(run_root), **changes}))


def folder(run_root, exp_name="mooss"):
    return run_root / f"cartpole-swingup__{exp_name}__s1"


def rows(path):
    """A CSV without its timing column."""
    with open(path) as file:
        return [{key: value for key, value in row.items() if key != "hours"} for row in csv.DictReader(file)]


def assert_equal(a, b, path=""):
    """Nested dictionaries and lists with tensors, to the last bit."""
    assert type(a) is type(b), path
    if isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            assert_equal(a[key], b[key], f"{path}/{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path
        for number, (x, y) in enumerate(zip(a, b)):
            assert_equal(x, y, f"{path}/{number}")
    else:
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, path


def saved_run(path):
    """Everything a finished run has saved, its replay put together; without paths and times."""
    state = torch.load(path / "checkpoint.pt", weights_only=True)
    pieces = [torch.load(path / "replay" / piece["file"], weights_only=True) for piece in state.pop("replay_pieces")]
    newest = min(sum(len(piece["rewards"]) for piece in pieces), state["args"]["buffer_size"])
    state["rows"] = {name: torch.cat([piece[name] for piece in pieces])[-newest:] for name in pieces[0]}
    for name in ("run_root", "resume", "total_timesteps"):
        del state["args"][name]
    del state["logger"]
    return state


def assert_same_run(a, b):
    assert rows(a / "train.csv") == rows(b / "train.csv") and rows(a / "eval.csv") == rows(b / "eval.csv")
    assert_equal(saved_run(a), saved_run(b))


def test_a_run_leaves_everything_and_really_learns(tmp_path, dot_env):
    assert run(tmp_path, capture_video=True) == 0
    path = folder(tmp_path)
    assert json.loads((path / "args.json").read_text())["batch_size"] == 6
    evaluations = rows(path / "eval.csv")
    assert [(int(row["step"]), int(row["episode"])) for row in evaluations] == [
        (step, episode) for step in (0, 40, 80, 120) for episode in (0, 1)]
    assert [int(row["update"]) for row in evaluations[::2]] == [0, 0, 20, 40]
    assert all(int(row["length"]) == 15 for row in evaluations)
    train = rows(path / "train.csv")
    assert [int(row["update"]) for row in train] == list(range(1, 40, 4))
    assert set(train[0]) == {"step", "update", *dmc.METRICS}
    assert all(row[key] != "" for row in train for key in row)
    assert all(float(row["mooss/mask_fraction"]) == 0.5 for row in train)
    assert len({row["losses/mooss"] for row in train}) > 5
    state = torch.load(path / "checkpoint.pt", weights_only=True)
    assert state["step"] == 120 and state["update"] == 40
    torch.manual_seed(1)
    untrained = dmc.Agent(dmc.Args(**state["args"]), *state["agent_shape"], torch.device("cpu"))
    moved = [name for name, value in untrained.state_dict().items() if not torch.equal(value, state["agent"][name])]
    assert len(moved) == len(state["agent"])
    import imageio
    video = imageio.mimread(path / "videos" / "step_000000120.mp4")
    assert len(video) == 15 and video[0].shape == (48, 48, 3)


def test_tensorboard_shows_pictures_and_the_table_of_flags(tmp_path, dot_env):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    run(tmp_path)
    events = EventAccumulator(str(folder(tmp_path)), size_guidance={"images": 0, "tensors": 0}).Reload()
    assert set(events.Tags()["images"]) == {"mooss/masked_observations", "mooss/query_key_similarity"}
    assert set(events.Tags()["scalars"]) >= {*dmc.METRICS, "eval/return_mean", "eval/return_std"}
    table = events.Tensors("hyperparameters/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "| --mask-ratio | 0.5 |" in table and "| --batch-size | 6 |" in table
    strip = events.Images("mooss/masked_observations")[0]
    assert (strip.height, strip.width) == (2 * 23, 8 * 23)  # two rows of eight frames, one pixel of gap around each


def test_same_seed_gives_the_same_run_and_another_seed_another(tmp_path, dot_env):
    for name in ("a", "b"):
        run(tmp_path / name)
    run(tmp_path / "c", seed=2)
    assert_same_run(folder(tmp_path / "a"), folder(tmp_path / "b"))
    other = tmp_path / "c" / "cartpole-swingup__mooss__s2"
    assert rows(folder(tmp_path / "a") / "train.csv") != rows(other / "train.csv")


@pytest.mark.parametrize("stop_at,planned", [(7, 120), (33, 120), (45, 120), (33, 200)])
def test_resumed_run_equals_uninterrupted_run(tmp_path, monkeypatch, stop_at, planned):
    """Stopped by a signal in the middle of an episode: random phase, learning, and after the replay has wrapped. A run
    that was planned to be longer ends like one that was not."""
    monkeypatch.setattr(dmc, "make_env", make_dot_env)
    run(tmp_path / "whole", buffer_size=40)
    steps = []

    class Interrupted(DotEnv):
        def step(self, action):
            steps.append(1)
            if len(steps) == stop_at + 60:  # two evaluation episodes of 15 steps at 0, and at 40 where it gets there
                os.kill(os.getpid(), signal.SIGTERM)
            return super().step(action)

    import gymnasium as gym
    monkeypatch.setattr(dmc, "make_env", lambda args, device: gym.wrappers.FrameStackObservation(
        Interrupted(args.render_size), args.frame_stack, padding_type="reset"))
    assert run(tmp_path / "parts", buffer_size=40, total_timesteps=planned) == 128 + signal.SIGTERM
    state = torch.load(folder(tmp_path / "parts") / "checkpoint.pt", weights_only=True)
    assert 0 < state["agent_step"] < 60
    monkeypatch.setattr(dmc, "make_env", make_dot_env)
    assert run(tmp_path / "parts", buffer_size=40, resume=True) == 0
    assert_same_run(folder(tmp_path / "whole"), folder(tmp_path / "parts"))


def test_csv_files_stay_clean_over_crash_resume_and_stop(tmp_path):
    """A crash leaves rows beyond the checkpoint; the resumed file knows its true size before the next row."""
    path = tmp_path / "x.csv"
    file = common.CsvFile(path, ("a", "b"))
    file.write({"a": 1, "b": 2})
    saved = file.synced_size()
    file.write({"a": 3, "b": 4})
    file.file.close()
    for _ in range(2):
        file = common.CsvFile(path, ("a", "b"), saved)
        assert file.synced_size() == saved
        file.file.close()
    file = common.CsvFile(path, ("a", "b"), saved)
    file.write({"a": 5, "b": 6})
    file.file.close()
    assert path.read_bytes() == b"a,b\r\n1,2\r\n5,6\r\n"


def test_a_finished_run_can_be_continued_further(tmp_path, dot_env):
    run(tmp_path / "long")
    run(tmp_path / "short", total_timesteps=80)
    assert run(tmp_path / "short", resume=True) == 0
    assert_same_run(folder(tmp_path / "long"), folder(tmp_path / "short"))
    before = (folder(tmp_path / "short") / "checkpoint.pt").stat().st_mtime_ns
    assert run(tmp_path / "short", resume=True) == 0  # finished: nothing is done twice
    assert run(tmp_path / "short", resume=True, total_timesteps=40) == 0
    assert (folder(tmp_path / "short") / "checkpoint.pt").stat().st_mtime_ns == before
    assert_same_run(folder(tmp_path / "long"), folder(tmp_path / "short"))


def test_resume_without_a_folder_begins_a_run(tmp_path, dot_env):
    assert run(tmp_path, resume=True) == 0


def test_an_existing_folder_is_refused_and_left_alone(tmp_path, dot_env):
    run(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in sorted(folder(tmp_path).rglob("*"))}
    with pytest.raises(common.UsageError, match="--resume"):
        run(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in sorted(folder(tmp_path).rglob("*"))} == before


def test_resume_with_other_flags_says_what_differs(tmp_path, dot_env):
    run(tmp_path)
    with pytest.raises(common.UsageError, match="gamma was 0.99, is 0.9"):
        run(tmp_path, resume=True, gamma=0.9)


def test_a_locked_folder_is_refused(tmp_path, dot_env):
    run(tmp_path)
    args = dmc.resolve_args(dmc.Args(**{**SHORT, "run_root": str(tmp_path), "resume": True}))
    holder = common.RunFolder(args)
    holder.claim()
    with pytest.raises(common.UsageError, match="another process"):
        run(tmp_path, resume=True)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path, dot_env):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(common.UsageError, match="cannot write"):
        run(tmp_path / "file")


def test_a_replay_that_cannot_fit_is_refused(tmp_path, dot_env):
    with pytest.raises(common.UsageError, match="GB are free"):
        run(tmp_path, buffer_size=10**8)
    assert not any(tmp_path.iterdir())


def test_a_checkpoint_loads_in_three_lines_and_acts(tmp_path, dot_env):
    run(tmp_path)
    agent, step = dmc.load_agent(folder(tmp_path) / "checkpoint.pt")
    obs, _ = make_dot_env(agent.args, None).reset(seed=0)
    action = agent.act(obs, deterministic=True)
    assert step == 120 and action.shape == (1,) and (agent.act(obs, deterministic=True) == action).all()
    state = agent.critic.encoder(torch.zeros(1, 9, 21, 21))
    assert state.shape == (1, 8)


def test_eval_only_repeats_the_final_evaluation(tmp_path, dot_env):
    run(tmp_path)
    final = [row["return"] for row in rows(folder(tmp_path) / "eval.csv") if row["step"] == "120"]
    assert dmc.main(dmc.Args(eval_only=True, checkpoint=str(folder(tmp_path) / "checkpoint.pt"), eval_episodes=2)) == 0
    assert [row["return"] for row in rows(folder(tmp_path) / "eval_only.csv")] == final
    assert (folder(tmp_path) / "videos" / "eval_only_120.mp4").stat().st_size > 0


def damage(path, kind):
    data = bytearray(path.read_bytes())
    if kind == "truncated":
        data = data[:len(data) // 2]
    elif kind == "empty":
        data = b""
    elif kind == "flipped":
        data[len(data) // 2] ^= 1
    elif kind == "foreign":
        torch.save({"weights": torch.zeros(3)}, path)
        return
    elif kind == "text":
        data = b"hello"
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("kind", ["truncated", "empty", "flipped", "foreign", "text", "missing", "folder"])
def test_eval_only_refuses_a_bad_checkpoint_with_one_sentence(tmp_path, dot_env, kind, capsys):
    path = tmp_path / "checkpoint.pt"
    if kind == "folder":
        path.mkdir()
    elif kind != "missing":
        run(tmp_path / "runs")
        path.write_bytes((folder(tmp_path / "runs") / "checkpoint.pt").read_bytes())
        damage(path, kind)
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_:
        common.run_cli(dmc.Args, dmc.main, ["--eval-only", "--checkpoint", str(path)])
    error = capsys.readouterr().err
    assert exit_.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1 and str(path) in error
    assert not (tmp_path / "eval_only.csv").exists()


@pytest.mark.parametrize("kind", ["truncated", "empty", "flipped"])
def test_a_damaged_checkpoint_falls_back_to_the_previous_one(tmp_path, dot_env, kind, capsys):
    run(tmp_path / "whole")
    run(tmp_path / "hurt")
    damage(folder(tmp_path / "hurt") / "checkpoint.pt", kind)
    assert run(tmp_path / "hurt", resume=True) == 0
    assert "checkpoint_previous.pt at step 120" in capsys.readouterr().out
    assert_same_run(folder(tmp_path / "whole"), folder(tmp_path / "hurt"))


def test_after_a_fall_back_the_damaged_checkpoint_is_not_kept_as_the_previous_one(tmp_path, dot_env):
    run(tmp_path / "whole")
    run(tmp_path / "hurt", total_timesteps=80)
    damage(folder(tmp_path / "hurt") / "checkpoint.pt", "flipped")
    assert run(tmp_path / "hurt", resume=True) == 0
    damage(folder(tmp_path / "hurt") / "checkpoint.pt", "flipped")
    assert run(tmp_path / "hurt", resume=True) == 0
    assert_same_run(folder(tmp_path / "whole"), folder(tmp_path / "hurt"))


def test_a_checkpoint_of_another_version_says_so(tmp_path, dot_env):
    run(tmp_path)
    state = torch.load(folder(tmp_path) / "checkpoint.pt", weights_only=True)
    for change, sentence in (({"format": 1}, "has checkpoint format 1, this version reads format 2"),
                             ({"script": None}, "was written by None.py")):
        torch.save({**state, **change}, tmp_path / "other.pt")
        with pytest.raises(common.UsageError, match=sentence):
            dmc.load_agent(tmp_path / "other.pt")


def test_parameters_that_are_not_finite_never_reach_a_checkpoint(tmp_path, dot_env, monkeypatch):
    """Even when every loss was finite."""
    update = dmc.Agent.update

    def broken(agent, replay, number, log):
        update(agent, replay, number, log)
        if number == 19:
            agent.actor.head[0].bias.data[0] = float("inf")

    monkeypatch.setattr(dmc.Agent, "update", broken)
    monkeypatch.setattr(dmc.Agent, "act", lambda agent, obs, deterministic=False: np.zeros(1, np.float32))
    monkeypatch.setattr(common, "flag_non_finite", lambda flags, metrics: None)
    with pytest.raises(common.UsageError, match="actor.head.0.bias became infinite"):
        run(tmp_path)
    assert torch.load(folder(tmp_path) / "checkpoint.pt", weights_only=True)["step"] == 40


def test_too_little_memory_is_one_sentence(capsys):
    def greedy():
        return torch.zeros(2**48)

    with pytest.raises(SystemExit) as exit_:
        common.exit_with(greedy)
    error = capsys.readouterr().err
    assert exit_.value.code == 2 and error.startswith("error: out of memory") and error.count("\n") == 1


def test_a_full_disk_is_one_sentence_and_keeps_the_last_checkpoint(tmp_path, dot_env, monkeypatch):
    run(tmp_path / "whole")
    run(tmp_path / "full", total_timesteps=80)

    def full(data, file):
        file.write(b"half")
        raise RuntimeError("unexpected pos")

    with monkeypatch.context() as patched:
        patched.setattr(common.torch, "save", full)
        with pytest.raises(common.UsageError, match="disk full"):
            run(tmp_path / "full", resume=True)
    assert not list(folder(tmp_path / "full").rglob("*.new"))
    assert run(tmp_path / "full", resume=True) == 0
    assert_same_run(folder(tmp_path / "whole"), folder(tmp_path / "full"))


def test_checkpoints_add_only_new_replay_rows(tmp_path, dot_env):
    """Rows are written once: the pieces of the last checkpoint cover all rows without overlap."""
    run(tmp_path)
    state = torch.load(folder(tmp_path) / "checkpoint.pt", weights_only=True)
    pieces = state["replay_pieces"]
    assert len(pieces) == 3 and pieces[0]["begin"] == 0
    assert all(a["end"] == b["begin"] for a, b in zip(pieces, pieces[1:]))
    assert {piece["file"] for piece in pieces} == {path.name for path in (folder(tmp_path) / "replay").iterdir()}


def test_weights_and_biases_keeps_its_run_over_a_resume(tmp_path, dot_env, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    flags = dict(track=True, wandb_project="p", wandb_entity="e", wandb_group="g")
    run(tmp_path, total_timesteps=80, **flags)
    run_id = (folder(tmp_path) / "wandb_id.txt").read_text()
    run(tmp_path, resume=True, **flags)
    assert (folder(tmp_path) / "wandb_id.txt").read_text() == run_id
    offline = list((folder(tmp_path) / "wandb").glob(f"offline-run-*-{run_id}"))
    assert offline and all(any(path.glob("*.wandb")) for path in offline)


def test_wandb_is_not_imported_without_track():
    code = "import sys, sac_mooss_dmc; print('wandb' in sys.modules, 'dm_control' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "False"]


@pytest.mark.parametrize("log_every", [1, 1000])
def test_a_reward_that_is_not_a_number_stops_the_run_and_keeps_the_checkpoint(tmp_path, monkeypatch, log_every):
    import gymnasium as gym

    class Broken(DotEnv):
        steps = 0

        def step(self, action):
            Broken.steps += 1
            frame, reward, *rest = super().step(action)
            return frame, float("nan") if Broken.steps == 90 else reward, *rest

    monkeypatch.setattr(dmc, "make_env", lambda args, device: gym.wrappers.FrameStackObservation(
        Broken(args.render_size), args.frame_stack, padding_type="reset"))
    with pytest.raises(common.UsageError, match="losses/critic.*not a number.*checkpoint.pt"):
        run(tmp_path, total_timesteps=400, checkpoint_every=20, eval_every=1000, log_every=log_every)
    saved = torch.load(folder(tmp_path) / "checkpoint.pt", weights_only=True)
    assert all(torch.isfinite(value).all() for value in saved["agent"].values())
    assert saved["step"] < 2 * 90


# ---------------------------------------------------------------------------------------------- progress, signals
def test_progress_is_a_live_line_on_a_terminal_and_plain_lines_elsewhere(capsys, monkeypatch):
    for live in (False, True):
        progress = common.Progress(1000)
        progress.live, progress.every = live, 0.0
        progress.mark = (common.time.time() - 10, 0, 0)
        progress.show(500, 50, {"losses/critic": torch.tensor(1.5), "charts/episodic_return": 12.0})
        out = capsys.readouterr().out
        assert "step 500/1,000" in out and "critic 1.5" in out and "episodic_return 12" in out
        assert "5.0" in out and "updates/s  ETA 0:00:1" in out
        assert ("[##########----------]" in out) == live
        assert out.startswith("\r") == live and out.endswith("\n") == (not live)


def test_paper_preset_on_a_cpu_says_how_long_it_takes(tmp_path, dot_env, capsys):
    run(tmp_path)
    out = capsys.readouterr().out
    assert "s on this CPU, so this run needs about" in out and "--preset laptop" in out
    assert "replay 0.00 GB on cpu" in out and "batch_size=6" in out


def test_a_second_interrupt_leaves_at_once():
    code = ("import os, signal, time, mooss_common\nstop = mooss_common.StopRequest()\n"
            "os.kill(os.getpid(), signal.SIGINT)\nprint(int(stop.signal), flush=True)\n"
            "os.kill(os.getpid(), signal.SIGINT)\n"
            "time.sleep(5)\nprint('still here')")
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert out.returncode == 130 and out.stdout == "2\n"


# ---------------------------------------------------------------------------------------------- OpenGL
class Probe:
    """Stands in for the probing subprocess: only `working` backends render."""

    def __init__(self, working):
        self.working, self.tried = working, []

    def __call__(self, command, env, capture_output):
        setting = (env["MUJOCO_GL"], env.get("MUJOCO_EGL_DEVICE_ID"))
        self.tried.append(setting)
        return subprocess.CompletedProcess(command, 0 if setting[0] in self.working else 1)


@pytest.fixture
def probe(monkeypatch):
    def install(*working, **environment):
        fake = Probe(working)
        for name in ("MUJOCO_GL", "MUJOCO_EGL_DEVICE_ID", "CUDA_VISIBLE_DEVICES"):
            monkeypatch.setenv(name, "")  # so that monkeypatch restores what the function sets
            monkeypatch.delenv(name)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(common.subprocess, "run", fake)
        return fake
    return install


def test_first_backend_that_renders_is_used(probe):
    fake = probe("osmesa", "glfw")
    assert common.use_headless_gl.__wrapped__(torch.device("cpu")) == "osmesa" == os.environ["MUJOCO_GL"]
    assert [name for name, _ in fake.tried] == ["egl", "osmesa"]


def test_what_the_user_set_wins_or_is_named(probe):
    fake = probe("glfw", "egl", MUJOCO_GL="glfw")
    assert common.use_headless_gl.__wrapped__(torch.device("cpu")) == "glfw" and len(fake.tried) == 1
    probe("egl", MUJOCO_GL="osmesa")
    with pytest.raises(common.UsageError, match="MUJOCO_GL=osmesa"):
        common.use_headless_gl.__wrapped__(torch.device("cpu"))


def test_no_backend_names_the_package(probe):
    probe()
    with pytest.raises(common.UsageError, match="apt-get install libegl1"):
        common.use_headless_gl.__wrapped__(torch.device("cpu"))


def test_rendering_happens_on_the_gpu_that_trains(probe):
    probe("egl", CUDA_VISIBLE_DEVICES="2,3")
    assert common.use_headless_gl.__wrapped__(torch.device("cuda", 1)) == "egl"
    assert os.environ["MUJOCO_EGL_DEVICE_ID"] == "3"
    fake = probe("egl", MUJOCO_EGL_DEVICE_ID="0")
    common.use_headless_gl.__wrapped__(torch.device("cuda", 1))
    assert fake.tried == [("egl", "0")]


# ---------------------------------------------------------------------------------------------- the real suite
def script(*words, cwd=ROOT, **environment):
    return subprocess.run([sys.executable, str(ROOT / "sac_mooss_dmc.py"), *words], cwd=cwd, capture_output=True,
                          text=True, env={**os.environ, **environment})


def test_end_to_end_on_a_real_task(tmp_path):
    words = ("--env-id ball_in_cup-catch --seed 1 --total-timesteps 1200 --init-steps 280 --batch-size 8 "
             "--aux-batch-size 2 --num-filters 4 --hidden-dim 32 --render-size 32 --image-size 28 --eval-every 2000 "
             "--eval-episodes 1 --buffer-size 500 --log-every 5 --device cpu").split()
    done = script(*words, "--run-root", str(tmp_path), MUJOCO_GL="")
    assert done.returncode == 0, done.stderr
    assert "MUJOCO_GL=" in done.stdout
    path = tmp_path / "ball_in_cup-catch__mooss__s1"
    evaluations, train = rows(path / "eval.csv"), rows(path / "train.csv")
    assert [(row["step"], row["update"], row["length"]) for row in evaluations] == [
        ("0", "0", "250"), ("1200", "20", "250")]
    assert [row["update"] for row in train] == ["1", "6", "11", "16"]
    assert all(np.isfinite(float(row["losses/mooss"])) for row in train)
    again = script(*words, "--run-root", str(tmp_path))
    assert again.returncode == 2 and "exists" in again.stderr


@pytest.fixture(scope="module")
def real_env_args():
    return dict(env_id="cartpole-swingup", render_size=32, image_size=28, device="cpu")


def test_real_environment_keeps_its_promises(real_env_args):
    """Stack, repeat, reward sum, bounds, time limit as truncation, and the same episode from the same seed."""
    args = dmc.resolve_args(dmc.Args(**real_env_args))
    env, twin = (dmc.make_env(args, torch.device("cpu")) for _ in range(2))
    obs, _ = env.reset(seed=5)
    assert obs.shape == (3, 3, 32, 32) and obs.dtype == np.uint8
    assert (obs == obs[:1]).all() and (env.action_space.low, env.action_space.high) == (-1, 1)
    twin.reset(seed=5)
    rewards, done, length = [], False, 0
    while not done:
        action = np.array([np.sin(length)], np.float32)
        previous = obs
        obs, reward, terminated, truncated, _ = env.step(action)
        other, other_reward, *_ = twin.step(action)
        assert (obs == other).all() and reward == other_reward
        assert (obs[:-1] == previous[1:]).all()
        rewards.append(reward)
        length, done = length + 1, terminated or truncated
    assert length == 125 and truncated and not terminated
    assert max(rewards) > 1  # eight rewards of at most 1 are summed
    single = dmc.make_env(dmc.resolve_args(dmc.Args(**real_env_args, action_repeat=1)), torch.device("cpu"))
    single.reset(seed=5)
    assert sum(single.step(np.array([np.sin(0)], np.float32))[1] for _ in range(8)) == pytest.approx(rewards[0])


def test_actions_are_scaled_from_minus_one_to_one():
    args = dmc.resolve_args(dmc.Args(env_id="pendulum-swingup", render_size=32, image_size=28, action_repeat=1))
    env = dmc.make_env(args, torch.device("cpu"))
    env.reset(seed=0)
    env.step(np.ones(1, np.float32))
    assert env.unwrapped.physics.data.ctrl[0] == env.unwrapped._env.action_spec().maximum[0]


@pytest.mark.parametrize("words,expected", [
    ("--env-id reacher-eazy", "reacher-easy"), ("--env-id lqr-lqr_2_1", "time limit"),
    ("--camera-id 9", "--camera-id"), ("--render-size 640", "--render-size"),
    ("--env-id reacher-easy --action-repeat 200", "--seq-len"),
    ("--device cuda:7", "--device"),
    ("--device tpu", "--device"), ("--replay-device cuda", "--replay-device")])
def test_bad_input_is_refused_before_anything_is_written(words, expected, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        common.run_cli(dmc.Args, dmc.main, words.split())
    error = capsys.readouterr().err
    assert exit_.value.code == 2 and expected in error and error.count("\n") == 1
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("words,expected", [
    ("--env-id reacher-eazy", "reacher-easy"), ("--cube-size 5", "--cube-size 5 does not divide --image-size 84"),
    ("--mask-ratio 1.5", "--mask-ratio 1.5"), ("--temporal-window 16", "--temporal-window 16"),
    ("--preset fast", "preset"), ("--batch-size many", "batch-size"),
    ("--eval-only --checkpoint nowhere.pt", "nowhere.pt")])
def test_bad_input_on_the_command_line_exits_2_without_traceback(words, expected, tmp_path):
    done = script(*words.split(), cwd=tmp_path)
    assert done.returncode == 2 and expected in done.stderr + done.stdout and "Traceback" not in done.stderr
    assert not any(tmp_path.iterdir())
