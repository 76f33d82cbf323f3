"""Fast paths equal plain ones, and an update never waits for the device."""

import ast
import copy
import json
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import mooss_common as common
import rainbow_mooss_atari as atari
import sac_mooss_dmc as dmc
from conftest import (ROOT, TINY, TINY_ATARI, filled_atari_replay, filled_replay, make_dot_env, make_dot_game,
                      tiny_agent, tiny_args, tiny_atari_agent, tiny_atari_args)

sys.path.insert(0, str(ROOT / "benchmark"))
import speed


class ForbidWaiting(TorchDispatchMode):
    """Fails on operations that make the host wait for the device: reading a scalar, shapes that depend on data."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name()
        assert name not in ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::unique2",
                            "aten::is_nonzero"), f"{name} makes the host wait"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("script", ["dmc", "atari"])
def test_an_update_never_waits_for_the_device(script, log):
    if script == "dmc":
        args = tiny_args()
        agent, replay = tiny_agent(args), filled_replay(args)
        step = lambda update: agent.update(replay, update, log)  # noqa: E731
    else:
        args = tiny_atari_args()
        agent, replay = tiny_atari_agent(args), filled_atari_replay(args)
        step = lambda update: agent.update(replay, update, 0.5, log)  # noqa: E731
    step(0)  # draws the masks of the first block on the host
    for optimizer in agent.optimizers.values():
        optimizer.step = lambda: None  # an optimiser's own step may wait
    with ForbidWaiting():
        step(1)
        step(2)


@pytest.mark.parametrize("file", ["sac_mooss_dmc.py", "rainbow_mooss_atari.py"])
def test_losses_and_updates_read_nothing_back(file):
    """No .item(), .cpu(), .numpy() or .tolist() in anything that an update calls."""
    called = {"update", "mooss_step", "critic_loss", "actor_loss", "mooss_loss", "key_states", "rl_loss", "q_values",
              "augment", "stack_frames", "as_words", "random_crop", "random_intensity", "temporal_contrastive_loss",
              "rank_accuracy", "ema_update", "observations", "outcomes", "frames_for", "returns", "sequences", "write",
              "sample", "set_priorities", "project_distribution", "forward", "__call__", "draw_noise", "features",
              "state"}
    found = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.FunctionDef) and node.name in called:
            found.add(node.name)
            for inner in ast.walk(node):
                if isinstance(inner, ast.Attribute):
                    assert inner.attr not in ("item", "cpu", "numpy", "tolist"), f"{node.name}: .{inner.attr}"
    assert found >= {"update", "mooss_loss", "key_states", "temporal_contrastive_loss", "rank_accuracy", "forward"} | (
        {"augment", "observations", "outcomes", "mooss_step", "critic_loss", "actor_loss"} if "dmc" in file else
        {"stack_frames", "random_crop", "random_intensity", "frames_for", "sample", "rl_loss", "set_priorities"})


def test_act_comes_before_update_and_update_before_the_environment():
    for file in ("sac_mooss_dmc.py", "rainbow_mooss_atari.py"):
        body = (ROOT / file).read_text().split("    while True:")[1]
        assert body.index("agent.act(") < body.index("agent.update(") < body.index("env.step(action)")


def test_fused_crop_gather_equals_stack_then_crop():
    args = tiny_args()
    replay = filled_replay(args)
    rows = replay.sample_rows(50)
    top, left = torch.randint(4, (2, 50))
    zero = torch.zeros_like(rows)
    whole = replay.observations(rows, zero, zero, 24)
    plain = torch.stack([image[:, y:y + 21, x:x + 21] for image, y, x in zip(whole, top, left)])
    assert torch.equal(replay.observations(rows, top, left, 21), plain)


@pytest.mark.parametrize("m", [0.0, 0.9, 1.0])
def test_foreach_ema_equals_a_loop(m):
    a, b = torch.nn.Linear(5, 5).double(), torch.nn.Linear(5, 5).double()
    plain = [m * x + (1 - m) * y for x, y in zip(a.parameters(), b.parameters())]
    dmc.ema_update(a, b, m)
    assert all(torch.allclose(x, y, atol=1e-15) for x, y in zip(a.parameters(), plain))


def test_channels_last_and_in_place_relu_equal_the_plain_network():
    """The encoder in float64: same value, same gradient as contiguous memory and a ReLU of its own."""
    torch.manual_seed(0)
    fast = dmc.Encoder(9, 21, 8, 6).double().to(memory_format=torch.channels_last)
    plain = copy.deepcopy(fast).to(memory_format=torch.contiguous_format)
    for number, layer in enumerate(plain.convs):
        if isinstance(layer, torch.nn.ReLU):
            plain.convs[number] = torch.nn.ReLU()
    obs = torch.rand(4, 9, 21, 21, dtype=torch.float64)
    states = fast(obs.contiguous(memory_format=torch.channels_last)), plain(obs)
    assert torch.allclose(*states, atol=1e-12)
    for state in states:
        (state * torch.arange(24.0).view(4, 6)).sum().backward()
    for a, b in zip(fast.parameters(), plain.parameters()):
        assert torch.allclose(a.grad, b.grad, atol=1e-10)


def test_one_conv_pass_in_the_actor_update_equals_two():
    """Gradients of the actor with shared features equal those of separate passes through detached convs."""
    args = tiny_args()
    agent = tiny_agent(args).double()
    agent.actor.forward = lambda features: split(agent.actor, features)
    obs, noise = torch.rand(6, 9, 21, 21, dtype=torch.float64), torch.randn(6, 1, dtype=torch.float64)

    def split(actor, features):
        mean, log_std = actor.head(actor.projection(features)).chunk(2, dim=-1)
        return mean, -10 + 6 * (torch.tanh(log_std) + 1)

    action, log_prob = agent.actor.sample(agent.critic.encoder.convs(obs).detach(), noise)
    q = [head(torch.cat([agent.critic.encoder(obs), action], 1)) for head in agent.critic.heads]
    plain = (agent.log_alpha.exp().detach() * log_prob - torch.minimum(*q)).mean()
    fast, _, _ = agent.actor_loss(obs, noise)
    parameters = list(agent.actor.parameters())
    for a, b in zip(torch.autograd.grad(plain, parameters), torch.autograd.grad(fast, parameters)):
        assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("colour,frame_stack", [(False, 4), (True, 4), (False, 3)])
def test_masking_whole_pixels_equals_multiplying_by_the_mask(colour, frame_stack):
    """The bytes of a pixel make one 32-bit number, or three, or none."""
    args = tiny_atari_args(augmentations=(), frame_stack=frame_stack, gray_scale=not colour)
    shape, seen = (3 if colour else 1, 28, 28), []
    agent = atari.Agent(args, (frame_stack, *shape), 3, torch.device("cpu"))
    replay = atari.SequenceReplay(100, shape, frame_stack, args.seq_len, args.multi_step, torch.device("cpu"))
    for frame in torch.randint(256, (60, *shape), dtype=torch.uint8):
        replay.add(frame, 0, 0.0, False)
    rows, weights = replay.sample(args.batch_size, 0.5)
    replay.sample = lambda count, beta: (rows, weights)
    loss = agent.mooss_loss
    agent.mooss_loss = lambda masked, *rest: seen.append(masked.clone()) or loss(masked, *rest)
    agent.update(replay, 5, 0.5, log=False)
    frames = replay.frames_for(rows, args.seq_len)
    stacks = torch.stack([frames[:, i:i + frame_stack] for i in range(args.seq_len)], dim=1).flatten(2, 3)
    assert torch.allclose(seen[0], stacks.flatten(0, 1) / 255 * ~agent.masks(5))


def test_noise_applied_without_its_matrix_equals_the_matrix():
    torch.manual_seed(0)
    layer = atari.NoisyLinear(7, 5, 0.5).double()
    layer.draw_noise()
    x = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    weight = layer.weight + layer.weight_sigma * torch.outer(layer.noise_out, layer.noise_in)
    plain = torch.nn.functional.linear(x, weight, layer.bias + layer.bias_sigma * layer.noise_out)
    fast, inputs = layer(x), [x, *layer.parameters()]
    assert torch.allclose(fast, plain, atol=1e-12)
    for a, b in zip(torch.autograd.grad((fast**2).sum(), inputs), torch.autograd.grad((plain**2).sum(), inputs)):
        assert torch.allclose(a, b, atol=1e-12)


def test_priorities_in_a_tree_equal_a_plain_cumulative_search():
    tree = atari.SumTree(64, torch.device("cpu"))
    priorities = torch.rand(64, dtype=torch.float64)
    tree.write(torch.arange(64), priorities)
    torch.manual_seed(3)
    slots, _ = tree.sample(5000)
    torch.manual_seed(3)
    mass = torch.rand(5000, dtype=torch.float64) * priorities.sum()
    plain = torch.searchsorted(priorities.cumsum(0), mass, right=True)
    assert (slots == plain).float().mean() > 0.999  # sums in another order differ in the last bit


def test_compile_falls_back_with_one_warning(monkeypatch, capsys):
    def broken(function, **options):
        def call(*inputs):
            raise torch._dynamo.exc.TorchDynamoException("no compiler here")
        return call

    monkeypatch.setattr(torch, "compile", broken)
    double = common.maybe_compile(lambda x: (2 * x,), True, torch.device("cpu"))
    assert [double(torch.tensor(value))[0].item() for value in (1, 2)] == [2, 4]
    error = capsys.readouterr().err
    assert error.count("--compile does not work here") == 1 and "no compiler here" in error


@pytest.mark.parametrize("script", ["dmc", "atari"])
def test_speed_tool_measures_every_stage(script, capsys, monkeypatch):
    tiny, make = {"dmc": (TINY, make_dot_env), "atari": (TINY_ATARI, make_dot_game)}[script]
    module = {"dmc": dmc, "atari": atari}[script]
    monkeypatch.setattr(module, "make_env", make)
    flags = [word for name, value in tiny.items() for word in
             (f"--{name.replace('_', '-')}", *map(str, value if isinstance(value, tuple) else (value,)))]
    assert speed.main(["--script", script, "--json", "--repeats", "2", "--growth", *flags]) == 0
    result = json.loads(capsys.readouterr().out)
    expected = {"act", "env step", "sample", "augment", "mask", "key encode", "query encode", "decode", "loss",
                "backward", "optimise", "target updates", "logging"} | (
        {"critic", "actor"} if script == "dmc" else {"rl loss", "priorities"})
    assert expected <= set(result["stages_ms"]) and all(value >= 0 for value in result["stages_ms"].values())
    assert result["update_ms"] > 0 and result["floor_ms"] > 0
    assert result["ratio"] == pytest.approx(result["update_ms"] / result["floor_ms"], rel=0.01)
    assert result["replay_bytes"] > 0 and result["torch"] == torch.__version__ and result["hardware"]
    assert {row["what"] for row in result["growth"]} == {"batch size", "sequence length", "window L", "replay fill"}
