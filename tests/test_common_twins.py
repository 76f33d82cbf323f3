"""Pieces that both scripts carry are the same text."""

import ast
import dataclasses
import typing

import pytest

import rainbow_mooss_atari as atari
import sac_mooss_dmc as dmc

# All that differs on purpose: the two benchmarks, the two base algorithms, and their replays.
DIFFERENT = {
    "Args", "PAPER", "TASK_PRESETS", "PRESETS", "fill_presets", "resolve_args", "make_env",
    "SequenceReplay", "augment", "Agent", "mooss_pictures", "evaluate", "verdict",
    "PACKAGES", "Counters", "main",
}
# The same, method by method, for the classes among them that have methods.
DIFFERENT_METHODS = {
    "SequenceReplay": {
        "__init__", "add", "_append", "sample", "state_dict", "load_state_dict"},
    "Agent": {
        "__init__", "act", "update", "backward", "encode_keys", "mooss_loss", "update_targets",
        "images_per_update", "encoder_metrics"},
}


def text_of(nodes, source):
    """The text of functions, classes and assignments by their names, decorators included."""
    lines = source.splitlines()
    found = {}
    for node in nodes:
        if isinstance(node, ast.Assign):
            name = ast.unparse(node.targets[0])
            first = node.lineno
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            name = node.name
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        else:
            continue
        found[name] = "\n".join(lines[first - 1:node.end_lineno])
    return found


def pieces(script):
    with open(script.__file__) as file:
        source = file.read()
    return text_of(ast.parse(source).body, source)


def methods(script, name):
    with open(script.__file__) as file:
        source = file.read()
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    return text_of(*[node.body for node in classes if node.name == name], source)


SHARED = sorted(pieces(dmc).keys() & pieces(atari).keys())
SHARED_METHODS = [
    (name, method) for name in DIFFERENT_METHODS
    for method in sorted(methods(dmc, name).keys() & methods(atari, name).keys())]


@pytest.mark.quick
@pytest.mark.parametrize("name", SHARED)
def test_what_both_scripts_carry_is_the_same_text(name):
    """A name that differs on purpose really differs, so that the list above stays short."""
    same = pieces(dmc)[name] == pieces(atari)[name]
    assert same == (name not in DIFFERENT)


@pytest.mark.quick
@pytest.mark.parametrize("name,method", SHARED_METHODS)
def test_methods_of_one_name_are_the_same_text(name, method):
    same = methods(dmc, name)[method] == methods(atari, name)[method]
    assert same == (method not in DIFFERENT_METHODS[name])


def test_all_that_differs_on_purpose_is_in_both_scripts():
    assert set(SHARED) >= DIFFERENT
    listed = {(name, method) for name, group in DIFFERENT_METHODS.items() for method in group}
    assert set(SHARED_METHODS) >= listed


def test_masks_decoder_and_loss_are_twins():
    """The method itself, by name: a piece that was renamed in one script would be no twin."""
    method = {"random_walk_masks", "uniform_cube_masks", "MaskBank", "PredictiveDecoder",
              "temporal_contrastive_loss", "rank_accuracy", "ema_update"}
    assert set(SHARED) - DIFFERENT >= method


def test_flags_that_steer_a_run_have_the_same_names_in_both_scripts():
    shared = (
        "env_id seed exp_name run_root preset total_timesteps eval_every eval_episodes "
        "checkpoint_every log_every resume eval_only checkpoint capture_video track wandb_project "
        "wandb_entity wandb_group device replay_device torch_deterministic compile amp").split()
    for script in (dmc, atari):
        names = [field.name for field in dataclasses.fields(script.Args)]
        assert [name for name in names if name in shared] == shared


def test_flags_of_one_name_are_of_one_type():
    ours = typing.get_type_hints(dmc.Args)
    theirs = typing.get_type_hints(atari.Args)
    # Each script has its own presets.
    shared = (ours.keys() & theirs.keys()) - {"preset"}
    assert len(shared) > 40
    assert {name: ours[name] for name in shared} == {name: theirs[name] for name in shared}
