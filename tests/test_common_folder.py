"""Run folders and checkpoints: whom they belong to, what they hold, what is refused in a sentence.

Faults that strike a running process are in test_common_faults, random damage in
test_common_damage.
"""

import json
import shutil
import types

import numpy as np
import pytest
import torch

import mooss_common as common
import rainbow_mooss_atari as atari
import sac_mooss_dmc as dmc
from helpers import runs, tiny
from helpers.dot_run import BOTH, folder, run
from helpers.runs import assert_same_run, load

pytestmark = pytest.mark.usefixtures("dot_env", "dot_game")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a finished run of each script; nobody writes to it."""
    folders = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dmc, "make_env", tiny.make_dot_env)
        patch.setattr(atari, "make_env", tiny.make_dot_game)
        for module in (dmc, atari):
            root = tmp_path_factory.mktemp(module.__name__)
            assert run(module, root) == 0
            folders[module] = folder(module, root)
    return folders


@pytest.fixture
def finished(whole, module, tmp_path):
    """A copy of a finished run below `tmp_path`, to be damaged."""
    path = folder(module, tmp_path)
    shutil.copytree(whole[module], path)
    return path


def said_by(function, capsys):
    """The exit code of what a process would run, and its standard error."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        common.exit_with(function)
    return ended.value.code, capsys.readouterr().err


def assert_one_sentence(function, capsys, expected):
    code, error = said_by(function, capsys)
    assert code == 2
    assert error.startswith("error: ") and error.count("\n") == 1
    assert str(expected) in error


def times(path):
    return {file: file.stat().st_mtime_ns for file in path.rglob("*")}


# ---------------------------------------------------------------------------------- whose it is
@BOTH
def test_resume_without_a_folder_begins_a_run(module, tmp_path, whole):
    assert run(module, tmp_path, resume=True) == 0
    assert_same_run(whole[module], folder(module, tmp_path))


@BOTH
def test_resume_goes_on_where_a_run_was_killed_in_its_first_moment(module, tmp_path):
    """It has its lock, and perhaps half of its flags."""
    folder(module, tmp_path).mkdir()
    (folder(module, tmp_path) / ".lock").touch()
    (folder(module, tmp_path) / "args.json.new").write_text('{"env_')
    assert run(module, tmp_path, resume=True) == 0


@BOTH
def test_an_existing_folder_is_refused_and_left_alone(module, tmp_path, finished, capsys):
    before = times(tmp_path)
    assert_one_sentence(lambda: run(module, tmp_path), capsys, "exists: add --resume")
    assert times(tmp_path) == before


@BOTH
@pytest.mark.parametrize("resume", [True, False])
def test_a_folder_that_holds_no_run_is_refused_and_left_alone(module, resume, tmp_path, capsys):
    folder(module, tmp_path).mkdir()
    (folder(module, tmp_path) / "thesis.tex").write_text("years of work")
    before = times(tmp_path)
    expected = "holds no run of ours" if resume else "exists"
    assert_one_sentence(lambda: run(module, tmp_path, resume=resume), capsys, expected)
    assert times(tmp_path) == before


@BOTH
def test_resume_with_other_flags_says_what_differs(module, tmp_path, finished, capsys):
    before = times(tmp_path)
    assert_one_sentence(
        lambda: run(module, tmp_path, resume=True, gamma=0.9, tau0=0.1), capsys,
        "made with other settings (gamma was 0.99, is 0.9; tau0 was 0.07, is 0.1)")
    assert times(tmp_path) == before


@BOTH
def test_flags_of_where_and_how_a_run_runs_may_change_at_a_resume(module, tmp_path, finished):
    assert run(module, tmp_path, resume=True, checkpoint_every=7, replay_device="cpu") == 0


@BOTH
@pytest.mark.parametrize("where", ["runs", "the run"])
def test_a_file_in_the_way_of_the_folder_is_refused(module, where, tmp_path, capsys):
    root = tmp_path / "runs"
    path = root if where == "runs" else folder(module, root)
    path.parent.mkdir(exist_ok=True)
    path.write_text("in the way")
    assert_one_sentence(lambda: run(module, root, resume=True), capsys, path)
    assert path.read_text() == "in the way"


@BOTH
def test_a_folder_that_goes_away_while_a_run_runs_is_one_sentence(module, tmp_path, capsys):
    path = folder(module, tmp_path)
    steps = runs.Steps().at("training", 45, lambda: path.rename(tmp_path / "elsewhere"))
    with pytest.MonkeyPatch.context() as patch:
        steps.watch(patch, module)
        code, error = said_by(lambda: run(module, tmp_path), capsys)
    assert (code, error.count("\n")) == (2, 1)
    assert error.startswith("error: ") and str(path) in error


# ------------------------------------------------------------------------------- what it holds
@BOTH
def test_checkpoints_add_only_new_rows_of_the_replay(module, whole):
    """Rows are written once; the files of both checkpoints cover their rows without overlap."""
    path = whole[module]
    newest = load(path / "checkpoint.pt")
    previous = load(path / "checkpoint_previous.pt")
    written = sorted(file.stem for file in (path / "replay").iterdir())
    bounds = [tuple(map(int, name.split("-"))) for name in written]
    assert len(bounds) >= 3 and bounds[0][0] == 0
    assert all(before[1] == after[0] for before, after in zip(bounds, bounds[1:]))
    assert bounds[-1][1] == newest["replay"]["newest_row"]
    assert bounds[-2][1] == previous["replay"]["newest_row"]
    for name, (begin, end) in zip(written, bounds):
        rows = load(path / "replay" / f"{name}.pt")
        assert {len(column) for column in rows.values()} == {end - begin}


@BOTH
def test_files_of_rows_that_were_overwritten_are_removed(module, tmp_path):
    run(module, tmp_path, buffer_size=40, checkpoint_every=14)
    path = folder(module, tmp_path)
    oldest = load(path / "checkpoint_previous.pt")["replay"]["newest_row"] + 1 - 40
    ends = [int(file.stem.split("-")[1]) for file in (path / "replay").iterdir()]
    assert oldest > 0 and min(ends) > oldest


@BOTH
def test_a_file_to_use_is_smaller_than_one_to_go_on_with(module, whole):
    agent = whole[module] / "agent.pt"
    checkpoint = whole[module] / "checkpoint.pt"
    assert agent.stat().st_size < checkpoint.stat().st_size / 2
    assert "optimizers" not in load(agent) and "replay" not in load(agent)


@BOTH
def test_a_checkpoint_holds_one_frame_and_leaves_the_others_to_the_pieces(module, whole):
    """Its file would hold all frames of the replay if it saved a view of them."""
    state = load(whole[module] / "checkpoint.pt")
    frame = state["replay"]["newest_frame"]
    assert frame.untyped_storage().nbytes() == frame.nbytes


@BOTH
def test_a_checkpoint_names_its_script_and_the_fingerprint_of_its_source(module, whole):
    flags = json.loads((whole[module] / "args.json").read_text())
    for name in ("checkpoint.pt", "agent.pt"):
        state = load(whole[module] / name)
        assert state["script"] == flags["script"] == module.__name__
        assert state["source"] == flags["source"]


# ------------------------------------------------------------------------------- what is damaged
@BOTH
def test_a_damaged_checkpoint_never_becomes_the_previous_one(module, tmp_path, whole, finished):
    """After a fall-back, the one that was whole can serve again."""
    newest, previous = (finished / name for name in common.CHECKPOINT_NAMES)
    for _ in range(2):
        runs.damage(newest, "flipped")
        assert run(module, tmp_path, resume=True) == 0
        assert_same_run(whole[module], finished)
        assert load(previous)["step"] < load(newest)["step"]


# What may be wrong with a checkpoint that this program wrote: by another version or a changed one.
WRONG = {
    "another version": lambda state: {**state, "format": 1},
    "no version": lambda state: {name: x for name, x in state.items() if name != "format"},
    "another script": lambda state: {**state, "script": "sac_my_variant"},
    "no agent": lambda state: {name: x for name, x in state.items() if name != "agent"},
    "an empty agent": lambda state: {**state, "agent": {}},
    "an agent of lists": lambda state: {**state, "agent": {name: [1] for name in state["agent"]}},
    "an agent of another size": lambda state: {
        **state, "agent": {name: x.flatten()[:3] for name, x in state["agent"].items()}},
}
# What only a resume reads.
WRONG_TO_GO_ON = {
    "no optimisers": lambda state: {**state, "optimizers": {}},
    "optimisers of words": lambda state: {
        **state, "optimizers": dict.fromkeys(state["optimizers"], "Adam")},
    "no replay": lambda state: {**state, "replay": {}},
    "unknown counters": lambda state: {**state, "counters": {"laps": 3}},
    "random numbers of another kind": lambda state: {**state, "torch_rng": torch.zeros(3)},
    "another seed": lambda state: {**state, "args": {**state["args"], "seed": 99}},
}
# What nothing of ours would write, although torch reads it.
EDITED = {
    "nothing changed": lambda state: state,
    "a list": lambda state: [1, 2, 3],
    "a number": lambda state: 7,
    "a step of words": lambda state: {**state, "step": "ten"},
    "counters of words": lambda state: {
        **state, "counters": dict.fromkeys(state["counters"], "ten")},
    "no logs": lambda state: {**state, "logs": {}},
    "no pieces of the replay": lambda state: {**state, "pieces": []},
    "metrics without a name": lambda state: {**state, "metrics": {1: 2}},
    "flags of words": lambda state: {**state, "args": dict.fromkeys(state["args"], "many")},
}


@BOTH
@pytest.mark.parametrize("what", [*WRONG, *WRONG_TO_GO_ON])
def test_a_wrong_checkpoint_falls_back_to_the_one_before(
        what, module, tmp_path, whole, finished, capsys):
    path = finished / "checkpoint.pt"
    common.write_atomically(path, {**WRONG, **WRONG_TO_GO_ON}[what](load(path)))
    falls_back(path, module, tmp_path, whole, capsys)


@BOTH
@pytest.mark.parametrize("what", EDITED)
def test_a_checkpoint_that_something_else_wrote_falls_back_too(
        what, module, tmp_path, whole, finished, capsys):
    path = finished / "checkpoint.pt"
    torch.save(EDITED[what](load(path)), path)
    falls_back(path, module, tmp_path, whole, capsys)


def falls_back(path, module, tmp_path, whole, capsys):
    assert run(module, tmp_path, resume=True) == 0
    skipped = capsys.readouterr().err
    assert skipped.startswith("skipping a checkpoint: ") and skipped.count("\n") == 1
    assert str(path) in skipped
    assert_same_run(whole[module], path.parent)


@BOTH
@pytest.mark.parametrize("what", EDITED)
def test_eval_only_refuses_a_checkpoint_that_something_else_wrote(
        what, module, tmp_path, whole, capsys):
    path = tmp_path / "checkpoint.pt"
    torch.save(EDITED[what](load(whole[module] / "checkpoint.pt")), path)
    args = module.Args(eval_only=True, checkpoint=str(path), device="cpu")
    assert_one_sentence(lambda: module.main(args), capsys, path)


@BOTH
@pytest.mark.parametrize("what", WRONG)
def test_eval_only_refuses_a_wrong_checkpoint_in_one_sentence(
        what, module, tmp_path, whole, capsys):
    path = tmp_path / "checkpoint.pt"
    common.write_atomically(path, WRONG[what](load(whole[module] / "checkpoint.pt")))
    args = module.Args(eval_only=True, checkpoint=str(path), device="cpu")
    assert_one_sentence(lambda: module.main(args), capsys, path)
    assert not (tmp_path / "eval_only.csv").exists()


def test_a_field_that_is_too_long_for_a_table_is_one_sentence(tmp_path, whole, capsys):
    shutil.copy(whole[dmc] / "agent.pt", tmp_path)
    (tmp_path / "eval_only.csv").write_text("x" * 200_000)
    args = dmc.Args(
        eval_only=True, checkpoint=str(tmp_path / "agent.pt"), device="cpu", eval_episodes=1)
    assert_one_sentence(lambda: dmc.main(args), capsys, tmp_path / "eval_only.csv")


@BOTH
@pytest.mark.parametrize(
    "kind", ["truncated", "empty", "flipped", "foreign", "text", "missing", "a folder"])
def test_eval_only_refuses_a_damaged_checkpoint_in_one_sentence(
        kind, module, tmp_path, whole, capsys):
    path = tmp_path / "checkpoint.pt"
    if kind == "a folder":
        path.mkdir()
    elif kind != "missing":
        shutil.copy(whole[module] / "checkpoint.pt", path)
        runs.damage(path, kind)
    args = module.Args(eval_only=True, checkpoint=str(path), device="cpu")
    assert_one_sentence(lambda: module.main(args), capsys, path)
    assert not (tmp_path / "eval_only.csv").exists()


# --------------------------------------------------------------------------------- not a number
@BOTH
def test_weights_that_are_not_finite_never_reach_a_checkpoint(module, tmp_path, monkeypatch):
    """Even where every loss was finite and no row is logged after it."""
    update = module.Agent.update

    def broken(agent, replay, index, *rest):
        update(agent, replay, index, *rest)
        if index == 19:
            list(agent.parameters())[-1].data.view(-1)[0] = float("inf")

    monkeypatch.setattr(module.Agent, "update", broken)
    every = {dmc: 40, atari: 30}[module]
    with pytest.raises(common.UsageError, match="became infinite or not a number by step"):
        run(module, tmp_path, log_every=1000, checkpoint_every=every)
    for name in common.CHECKPOINT_NAMES:
        path = folder(module, tmp_path) / name
        if path.exists():
            assert all(x.isfinite().all() for x in load(path)["agent"].values())
    assert load(folder(module, tmp_path) / "checkpoint.pt")["counters"]["update"] < 20


@BOTH
@pytest.mark.parametrize("log_every", [1, 1000])
def test_a_reward_that_is_not_a_number_stops_the_run(module, log_every, tmp_path, monkeypatch):
    """The sentence names what broke and the checkpoint that did not."""
    add = module.SequenceReplay.add
    added = []

    def broken(replay, action, reward, *rest):
        added.append(reward)
        add(replay, action, np.float32("nan") if len(added) == 45 else reward, *rest)

    monkeypatch.setattr(module.SequenceReplay, "add", broken)
    loss = {dmc: "losses/critic", atari: "losses/rl"}[module]
    with pytest.raises(common.UsageError, match=f"{loss}.*not a number.*checkpoint.pt"):
        run(module, tmp_path, total_timesteps={dmc: 400, atari: 200}[module],
            checkpoint_every=20, eval_every=1000, log_every=log_every)
    saved = load(folder(module, tmp_path) / "checkpoint.pt")
    assert all(x.isfinite().all() for x in saved["agent"].values())
    assert saved["step"] < 400
    assert 45 <= len(added) < 200


# --------------------------------------------------------------------------------------- sizes
@BOTH
@pytest.mark.parametrize("flag", ["buffer_size", "decoder_depth", "seq_len", "batch_size"])
def test_absurd_sizes_are_refused_before_anything_is_written(flag, module, tmp_path, capsys):
    assert_one_sentence(
        lambda: run(module, tmp_path, **{flag: 10**21}), capsys, f"--{flag.replace('_', '-')}")
    assert not any(tmp_path.iterdir())


def test_a_resume_on_another_gpu_takes_that_ones_own_random_state(tmp_path, monkeypatch):
    """A run began on cuda:0 and goes on on cuda:1; there is no GPU, so only the calls are seen."""
    restored = []
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda *state: restored.append(state))
    monkeypatch.setattr(torch, "set_rng_state", lambda state: None)
    agent = types.SimpleNamespace(
        device=torch.device("cuda", 1), optimizers={}, load_state_dict=lambda state: None)
    replay = types.SimpleNamespace(load_state_dict=lambda state: None)
    empty = dict.fromkeys(["replay", "agent", "metrics", "optimizers", "torch_rng"])
    of_the_run = common.RunFolder(tiny.dmc_args(), dmc.__file__)
    of_the_run.load({**empty, "pieces": [], "cuda_rng": ["a state"]}, agent, replay)
    assert restored == [("a state", torch.device("cuda", 1))]
