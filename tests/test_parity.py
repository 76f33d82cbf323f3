"""One update equals the authors' code: their losses and parameters over four updates, from the
same start and inputs.

Each `data/authors_update_*.json` holds what the authors' public DMC code computed in float64 for
one task, at a small size. Weights and inputs are given by formulas (`start_value`, `GivenInputs`),
so that the numbers are all there is to store. The real `Agent.update` runs here; only what it draws
(replay rows, crops, masks, noise) is given to it.
"""

import functools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import sac_mooss_dmc as dmc

FILES = sorted(Path(__file__).with_name("data").glob("authors_update_*.json"))
SEQ_LEN = 16
# The numbers name a tensor as commit e79a8b8 did; where the agent calls it otherwise now:
# {its name now: name then}.
NAMES_THEN = {}


# ------------------------------------------------------------------------------- start and inputs
def scrambled(index):
    """Knuth's multiplicative hash of integers, 32 bits."""
    return np.asarray(index).astype(np.uint64) * np.uint64(2654435761) % np.uint64(2**32)


@functools.cache
def pixels(offset, *shape):
    values = scrambled(offset + np.arange(math.prod(shape))) >> np.uint64(24)
    return torch.from_numpy(values.astype(np.float64)).view(shape)


def wave(phase, *shape, height=1.0):
    index = torch.arange(math.prod(shape), dtype=torch.float64)
    return (height * torch.sin(2.1 * index + 0.3 + phase)).view(shape)


def start_value(name, parameter, salt):
    if name == "log_alpha":
        return torch.full_like(parameter, math.log(0.1))
    key = sum(place * ord(letter) for place, letter in enumerate(name, start=1)) % 1000
    index = torch.arange(parameter.numel(), dtype=torch.float64).view(parameter.shape)
    values = torch.sin(0.37 * index + 0.011 * key + salt)
    if name == "bilinear":
        return 0.5 + 0.5 * values
    if parameter.dim() == 1:
        return 0.02 * values + name.endswith("weight")
    return values / math.sqrt(parameter.numel() / len(parameter))


class GivenInputs:
    """Stands where the replay does, and hands out the inputs of one update.

    Its `augment` and `masks` replace the agent's own.
    """

    def __init__(self, args, action_dim, salt):
        self.args = args
        self.action_dim = action_dim
        self.salt = salt
        self.index = 0
        self.views = []

    def begin(self, index):
        first = (4 * index + 64 * self.salt) * 10**8
        image = (9, 84, 84)
        count = self.args.aux_batch_size * SEQ_LEN
        obs = pixels(first, self.args.batch_size, *image)
        next_obs = pixels(first + 10**8, self.args.batch_size, *image)
        key_obs = pixels(first + 2 * 10**8, count, *image)
        query_obs = pixels(first + 3 * 10**8, count, *image)
        self.index = index
        # In the order in which an update asks for them. It masks the queries in place.
        self.views = [obs, next_obs, query_obs.clone(), key_obs]

    def sample(self, count, length=1):
        return torch.zeros(count, dtype=torch.long)

    def observations(self, rows):
        return None

    def augment(self, *_):
        return self.views.pop(0)

    def steps(self, rows):
        """Actions, rewards, terminated: of the RL batch, or of the sequences."""
        phase = self.index if rows.dim() == 1 else self.index + 3
        terminated = torch.zeros(rows.shape, dtype=torch.bool)
        terminated[..., 3] = rows.dim() == 1
        actions = wave(phase, *rows.shape, self.action_dim, height=0.9)
        return actions, 0.5 + 0.5 * wave(phase + 1, *rows.shape), terminated

    def randn(self, *shape, **_):
        return wave(self.index + 2, *shape, height=1.5)

    def masks(self, index):
        """The same mask for every sequence, as pixels (B * F, 1, H, W)."""
        args = self.args
        grid = (SEQ_LEN // args.cube_len, 12, 12)
        cells = scrambled(np.arange(math.prod(grid)) + 1000 * index + self.salt) >> np.uint64(31)
        cube = np.ones((args.cube_len, args.cube_size, args.cube_size))
        mask = torch.from_numpy(np.kron(cells.reshape(grid), cube) == 1)  # (F, H, W)
        return mask.repeat(args.aux_batch_size, 1, 1)[:, None]


# --------------------------------------------------------------------------------- the comparison
@pytest.fixture(autouse=True)
def double_precision():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def is_close(value, given, rel_tol=1e-6, abs_tol=0.0):
    return math.isclose(value.item(), given, rel_tol=rel_tol, abs_tol=abs_tol)


def differences(file, monkeypatch, updates=4, mutate=lambda agent: None, **flags):
    """Run the file's updates with the agent.

    What differs from the authors' numbers, each as `update quantity`.
    """
    expected = json.loads(file.read_text())
    salt = expected["salt"]
    sizes = dict(expected["sizes"])
    action_dim = sizes.pop("action_dim")
    args = dmc.resolve_args(dmc.Args(
        env_id=expected["task"], preset="authors", device="cpu", **sizes, **flags))
    agent = dmc.Agent(args, (3, 3, 100, 100), action_dim, torch.device("cpu"))
    named = {NAMES_THEN.get(name, name): parameter for name, parameter in agent.named_parameters()}
    start = {name: start_value(name, parameter, salt) for name, parameter in named.items()}
    for name, parameter in named.items():
        parameter.data.copy_(start[name])
    inputs = GivenInputs(args, action_dim, salt)
    monkeypatch.setattr(dmc, "augment", inputs.augment)
    monkeypatch.setattr(torch, "randn", inputs.randn)
    agent.masks = inputs.masks
    mutate(agent)

    found = []
    for update, numbers in enumerate(expected["updates"][:updates]):
        inputs.begin(update)
        agent.metrics.clear()
        agent.update(inputs, update, log=False)
        assert inputs.views == [], "the update did not use every input"
        for loss in ("critic", "mooss", "actor"):
            computed = agent.metrics.get(f"losses/{loss}")
            given = numbers.get(f"{loss}_loss")
            on_both = (computed is None) == (given is None)
            assert on_both, f"update {update}: {loss} loss on one side only"
            if given is not None and not is_close(computed, given, 1e-10, 1e-10):
                found.append(f"{update} {loss}_loss")
        if not is_close(agent.log_alpha.exp(), numbers["alpha"], 1e-12, 1e-12):
            found.append(f"{update} alpha")
        assert named.keys() == numbers["parameters"].keys()
        for name, (move, weighted_sum) in numbers["parameters"].items():
            values = named[name].detach()
            index = torch.arange(values.numel(), dtype=torch.float64)
            if not is_close((values - start[name]).norm(), move):
                found.append(f"{update} {name} move")
            if not is_close((values.flatten() * torch.cos(0.13 * index)).sum(), weighted_sum):
                found.append(f"{update} {name} sum")
    return found


@pytest.fixture(params=FILES, ids=lambda file: file.stem)
def file(request):
    return request.param


def test_there_are_numbers_to_compare_with():
    assert FILES


@pytest.mark.quick
def test_four_updates_equal_the_authors_code(file, monkeypatch):
    assert differences(file, monkeypatch) == []


# ------------------------------------------------------------------------------------- it can fail
FLAG_MUTATIONS = {  # flag, its wrong value, and what must show it
    "key encoder EMA at every update": (
        dict(target_update_period=1), "1 key_encoder.projection.0.weight move"),
    "target critic EMA at every update": (
        dict(critic_target_update_freq=1), "1 critic_target.heads.0.0.weight move"),
    "actor at every update": (dict(actor_update_freq=1), None),
    "learning rate of actor and critic": (dict(rl_lr=1.1e-3), "0 critic.heads.0.0.weight move"),
    "learning rate of the MOOSS step": (dict(aux_lr=5.001e-4), "0 decoder.head.0.weight move"),
    "learning rate of the temperature": (dict(alpha_lr=1.001e-4), "0 alpha"),
    "warm-up of the MOOSS step": (dict(aux_warmup_steps=6001), "1 decoder.head.0.weight move"),
    "EMA of the key encoder": (dict(target_ema=0.949), "0 key_encoder.projection.0.weight move"),
    "EMA of the target critic's encoder": (
        dict(critic_encoder_ema=0.951), "0 critic_target.encoder.convs.0.bias move"),
    "temporal window": (dict(temporal_window=6), "0 mooss_loss"),
    "reduction over levels": (dict(level_reduction="sum"), "0 mooss_loss"),
    "embeddings not normalised": (dict(normalize_embeddings=False), "0 mooss_loss"),
    "discount": (dict(gamma=0.991), "0 critic_loss"),
}


@pytest.mark.parametrize("mutation", FLAG_MUTATIONS)
def test_a_wrong_setting_is_seen(mutation, monkeypatch):
    flags, shown_by = FLAG_MUTATIONS[mutation]
    if mutation == "actor at every update":
        with pytest.raises(AssertionError, match="actor loss on one side only"):
            differences(FILES[0], monkeypatch, updates=2, **flags)
    else:
        updates = int(shown_by[0]) + 1
        assert shown_by in differences(FILES[0], monkeypatch, updates=updates, **flags)


@pytest.mark.parametrize("bound", ["LOG_STD_MIN", "LOG_STD_MAX"])
def test_a_wrong_bound_of_the_log_std_is_seen(bound, monkeypatch):
    monkeypatch.setattr(dmc, bound, getattr(dmc, bound) + 0.001)
    assert "0 actor_loss" in differences(FILES[0], monkeypatch, updates=1)


def mooss_after_actor(agent):
    """Hold the MOOSS step back until the actor has made its own."""
    mooss_step = agent.mooss_step
    update_targets = agent.update_targets
    held_back = []

    def late(update):
        mooss_step(*held_back.pop())
        update_targets(update)

    agent.mooss_step = lambda *inputs: held_back.append(inputs)
    agent.update_targets = late


def test_a_wrong_order_of_the_mooss_and_actor_steps_is_seen(monkeypatch):
    found = differences(FILES[0], monkeypatch, updates=1, mutate=mooss_after_actor)
    assert "0 actor_loss" in found and "0 mooss_loss" not in found


def test_emas_that_come_one_update_late_are_seen(monkeypatch):
    def late(agent):
        update_targets = agent.update_targets
        agent.update_targets = lambda update: update_targets(update + 1)

    found = differences(FILES[0], monkeypatch, updates=1, mutate=late)
    assert "0 critic_target.heads.0.0.weight move" in found
    assert "0 key_encoder.convs.0.weight move" in found
