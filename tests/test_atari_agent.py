"""The Atari agent: augmentation, noise, targets and updates against plain computations."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import rainbow_mooss_atari as atari
from helpers.tiny import atari_agent, atari_args, atari_replay
from rainbow_mooss_atari import NoisyLinear

CPU = torch.device("cpu")


# --------------------------------------------------------------------------------- augmentation
def test_crop_takes_windows_of_the_replicated_frame_and_draws_them_anew():
    args = atari_args(augmentations=("crop",))
    agent = atari_agent(args)
    replay = atari_replay(args)
    rows, _ = replay.sample(4, 0.4)
    frames = replay.frames_of(rows, 4)
    stacks = agent.stacks(replay, rows, 4)
    obs = (atari.augment(stacks, args) * 255).round().view(4, 4, 4, 28, 28)
    padded = F.pad(frames[:, :, 0].float(), (4, 4, 4, 4), mode="replicate")
    offsets = set()
    for b in range(4):
        for i in range(4):
            windows = padded[b, i:i + 4].unfold(1, 28, 1).unfold(2, 28, 1)  # (4, 9, 9, 28, 28)
            same = (windows == obs[b, i][:, None, None]).all(4).all(3).all(0)  # (9, 9)
            assert same.any()
            offsets.add(tuple(same.nonzero()[0].tolist()))
    assert len(offsets) > 5
    assert not torch.equal(atari.augment(stacks, args), atari.augment(stacks, args))


@pytest.mark.parametrize("per_sequence", [False, True])
def test_every_window_that_fits_is_taken_per_image_or_per_sequence(per_sequence):
    """D10, D15: pixels that tell their own place show where a window was."""
    torch.manual_seed(0)
    places = torch.arange(36, dtype=torch.uint8).view(6, 6)
    images = places.expand(500, 4, 1, 6, 6)
    windows = atari.random_crop(images, 4, per_sequence)
    assert windows.shape == (2000, 1, 4, 4)
    corners = windows[:, 0, 0, 0].view(500, 4)
    top = corners.flatten() // 6
    left = corners.flatten() % 6
    counts = torch.bincount(top.long() * 3 + left.long(), minlength=9)
    assert (counts > 2000 / 9 * 0.6).all() and len(counts) == 9
    expected = places.unfold(0, 4, 1).unfold(1, 4, 1)[top.long(), left.long()]
    assert torch.equal(windows[:, 0], expected)
    alike = (corners == corners[:, :1]).all(1)
    assert alike.all() if per_sequence else alike.float().mean() < 0.1


def test_intensity_scales_each_observation_by_one_clipped_normal_factor():
    args = atari_args(augmentations=("intensity",), intensity_scale=0.05)
    torch.manual_seed(0)
    stacks = torch.full((1000, 4, 4, 2, 2), 255, dtype=torch.uint8)
    factors = atari.augment(stacks, args).flatten(1)
    assert factors.shape == (4000, 16)
    assert torch.equal(factors, factors[:, :1].expand(-1, 16))
    noise = (factors[:, 0] - 1) / 0.05
    plain = torch.randn(200_000).clamp(-2, 2)
    assert noise.abs().max().item() == pytest.approx(2, abs=1e-4)
    assert noise.mean().item() == pytest.approx(0, abs=0.06)
    assert noise.std().item() == pytest.approx(plain.std().item(), abs=0.04)


def test_without_augmentation_observations_are_the_stacks():
    args = atari_args(augmentations=())
    replay = atari_replay(args)
    rows, _ = replay.sample(3, 0.4)
    frames = replay.frames_of(rows, 2)
    stacks = atari_agent(args).stacks(replay, rows, 2)
    obs = atari.augment(stacks, args).view(3, 2, 4, 28, 28) * 255
    assert torch.allclose(obs[:, 0], frames[:, :4, 0].float())
    assert torch.allclose(obs[:, 1], frames[:, 1:, 0].float())


def recorded(agent, name):
    """Inputs of the agent's method `name`, which goes on working."""
    calls = []
    method = getattr(agent, name)

    def record(*inputs):
        calls.append([value.clone() for value in inputs])
        return method(*inputs)

    setattr(agent, name, record)
    return calls


@pytest.mark.quick
@pytest.mark.parametrize("gray_scale,frame_stack", [(True, 4), (False, 4), (True, 3)])
def test_queries_see_the_masked_sequence_and_keys_the_whole_one(gray_scale, frame_stack):
    """Masked pixels are zero on all channels of all frames of a stack (A8: all are scaled)."""
    args = atari_args(augmentations=(), frame_stack=frame_stack, gray_scale=gray_scale)
    shape = (1 if gray_scale else 3, 28, 28)
    torch.manual_seed(0)
    agent = atari.Agent(args, (frame_stack, *shape), 3, CPU)
    replay = atari.SequenceReplay(100, shape, frame_stack, args.seq_len, args.multi_step, CPU)
    frames = torch.randint(1, 256, (60, *shape), dtype=torch.uint8)
    replay.begin_episode(frames[0])
    for frame in frames[1:]:
        replay.add(0, 0.0, False, frame)
    rows, weights = replay.sample(args.batch_size, 0.5)
    replay.sample = lambda count, beta: (rows, weights)
    queries = recorded(agent, "mooss_loss")
    keys = recorded(agent, "encode_keys")
    agent.update(replay, 5, 0.5, log=False)
    frames = replay.frames_of(rows, args.seq_len)
    stacks = [frames[:, i:i + frame_stack] for i in range(args.seq_len)]
    stacks = torch.stack(stacks, dim=1).flatten(2, 3).flatten(0, 1) / 255
    masks = agent.masks(5)
    assert 0.3 < masks.float().mean() < 0.7
    assert torch.allclose(queries[0][0], stacks * ~masks)
    assert torch.allclose(keys[0][0], stacks)


@pytest.mark.parametrize("augmentation", ["crop", "intensity"])
def test_each_use_of_an_observation_is_augmented_anew(augmentation):
    """s, s' for the argmax, s' for the target, queries and keys."""
    args = atari_args(augmentations=(augmentation,), mask_ratio=0.0)
    agent = atari_agent(args)
    rl = recorded(agent, "rl_loss")
    queries = recorded(agent, "mooss_loss")
    keys = recorded(agent, "encode_keys")
    agent.update(atari_replay(args), 0, 0.5, log=False)
    obs, _, _, _, next_obs, next_obs_target = rl[0]
    assert not torch.equal(next_obs, next_obs_target)
    assert not torch.equal(queries[0][0], keys[0][0])
    assert not torch.equal(obs, queries[0][0][::args.seq_len])
    assert not torch.equal(obs, keys[0][0][::args.seq_len])


# ----------------------------------------------------------------------------------------- noise
def test_noise_is_rank_one_and_off_when_not_asked_for():
    torch.manual_seed(0)
    layer = NoisyLinear(20, 10, 0.5)
    layer.draw_noise()
    x = torch.eye(20)
    noise = (layer(x) - layer.bias - layer.bias_sigma * layer.noise_out).T - layer.weight
    noise = noise / layer.weight_sigma
    assert torch.linalg.matrix_rank(noise, rtol=1e-3) == 1
    assert torch.allclose(noise, torch.outer(layer.noise_out, layer.noise_in), atol=1e-4)
    assert torch.equal(layer(x, noisy=False), F.linear(x, layer.weight, layer.bias))


def test_noisy_layers_start_as_published():
    layer = NoisyLinear(20, 10, 0.5)
    assert layer.weight_sigma.unique().item() == pytest.approx(0.5 / math.sqrt(20))
    assert layer.bias_sigma.unique().item() == pytest.approx(0.5 / math.sqrt(10))
    bound = 1 / math.sqrt(20)
    assert 0.9 * bound < layer.weight.abs().max() <= bound


def test_noise_applied_without_its_matrix_equals_the_matrix():
    torch.manual_seed(0)
    layer = NoisyLinear(7, 5, 0.5).double()
    layer.draw_noise()
    x = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    weight = layer.weight + layer.weight_sigma * torch.outer(layer.noise_out, layer.noise_in)
    plain = F.linear(x, weight, layer.bias + layer.bias_sigma * layer.noise_out)
    out = layer(x)
    assert torch.allclose(out, plain, atol=1e-12)
    inputs = [x, *layer.parameters()]
    gradients = torch.autograd.grad((out**2).sum(), inputs)
    for ours, expected in zip(gradients, torch.autograd.grad((plain**2).sum(), inputs)):
        assert torch.allclose(ours, expected, atol=1e-12)


def test_noise_has_the_factorised_distribution():
    torch.manual_seed(0)
    layer = NoisyLinear(20_000, 3, 0.5)
    layer.draw_noise()
    squared = layer.noise_in.sign() * layer.noise_in**2  # f(x) = sign(x) sqrt|x| undone
    assert abs(squared.mean()) < 0.05
    assert squared.std().item() == pytest.approx(1, abs=0.03)


def test_noise_is_drawn_once_per_update_and_copied_with_the_target(monkeypatch):
    args = atari_args()
    agent = atari_agent(args)
    replay = atari_replay(args)
    draws = []
    draw = NoisyLinear.draw_noise
    monkeypatch.setattr(NoisyLinear, "draw_noise", lambda layer: draws.append(layer) or draw(layer))
    agent.update(replay, 0, 0.4, log=False)
    layers = [module for module in agent.online.modules() if isinstance(module, NoisyLinear)]
    assert draws == layers and len(layers) == 4
    target = agent.target.state_dict()
    for name, online in agent.online.state_dict().items():
        assert torch.equal(online, target[name]), name  # a plain copy at every update
    noise = layers[0].noise_in.clone()
    agent.update(replay, 1, 0.4, log=False)
    assert not torch.equal(noise, layers[0].noise_in)


# ---------------------------------------------------------------------------------------- acting
def some_observations(count):
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (count, 4, 1, 28, 28), dtype=np.uint8)


def test_acting_is_noisy_in_training_and_not_in_evaluation():
    agent = atari_agent(atari_args(noisy_std=5.0))
    obs = some_observations(40)
    quiet = agent.act(obs)
    agent.online.draw_noise()
    assert (agent.act(obs) == quiet).all()
    assert (agent.act(obs, noisy=True) != quiet).any()


def test_act_takes_one_observation_or_many():
    """Each action is the one with the highest expected value."""
    agent = atari_agent(atari_args())
    for parameter in agent.online.advantage.parameters():
        parameter.data *= 30  # so that the best action is not always the same
    obs = some_observations(40)
    with torch.no_grad():
        out = agent.online(torch.from_numpy(obs).flatten(1, 2) / 255, noisy=False)
    support = torch.linspace(-10, 10, 11)
    expected = (out.softmax(2) * support).sum(2).argmax(1).numpy()
    assert len(set(expected)) > 1
    assert (agent.act(obs) == expected).all()
    assert [agent.act(one) for one in obs] == expected.tolist()
    assert np.ndim(agent.act(obs[0])) == 0
    assert agent.act(obs[:1]).shape == (1,)
    assert (agent.act(torch.from_numpy(obs)) == expected).all()


@pytest.mark.parametrize("shape", [
    (4, 1, 30, 30), (4, 1, 28, 30), (3, 1, 28, 28), (4, 3, 28, 28), (5, 4, 1, 56, 14), (1, 28, 28),
    (28, 28), (2, 5, 4, 1, 28, 28), (1, 1, 4, 28, 28), (4, 28, 28, 1)])
def test_act_refuses_observations_of_another_shape(shape):
    """Also those that the network would take, as the same number of bytes in another order."""
    agent = atari_agent(atari_args())
    with pytest.raises(ValueError) as refusal:
        agent.act(np.zeros(shape, np.uint8))
    assert "(4, 1, 28, 28)" in str(refusal.value)
    assert str(shape) in str(refusal.value)


def test_act_refuses_observations_that_are_not_bytes():
    agent = atari_agent(atari_args())
    with pytest.raises(ValueError, match="uint8.*float32"):
        agent.act(np.zeros((4, 1, 28, 28), np.float32))


# -------------------------------------------------------------------------------------- networks
def test_features_are_rescaled_to_the_unit_interval():
    network = atari_agent(atari_args()).online
    features = network.features(torch.rand(5, 4, 28, 28))
    assert torch.allclose(features.amin(1), torch.zeros(5))
    assert torch.allclose(features.amax(1), torch.ones(5))


def test_the_gradient_from_the_head_into_the_encoder_is_scaled():
    network = atari_agent(atari_args()).online
    obs = torch.rand(5, 4, 28, 28)
    weight = network.convs[0].weight
    scaled = torch.autograd.grad(network(obs).sum(), weight)[0]
    plain = torch.autograd.grad(dueling(network, obs).sum(), weight)[0]
    assert plain.abs().max() > 1e-4
    assert torch.allclose(scaled, plain / math.sqrt(2), rtol=1e-4, atol=1e-7)


def test_paper_network_sizes():
    args = atari.resolve_args(atari.Args(env_id="Pong"))
    agent = atari.Agent(args, (4, 1, 84, 84), 6, CPU)
    obs = torch.zeros(1, 4, 84, 84)
    assert agent.online.features(obs).shape == (1, 64 * 7 * 7)
    assert agent.online(obs).shape == (1, 6, 51)
    assert agent.online.projection[0].weight.shape == (64, 3136)
    assert agent.optimizers["all"].defaults["betas"] == (0.9, 0.999)
    assert agent.optimizers["all"].defaults["lr"] == 1e-4
    assert [group["eps"] for group in agent.optimizers["all"].param_groups] == [1.5e-4, 1.5e-4]


@pytest.fixture
def double_precision():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_channels_last_and_in_place_relu_equal_the_plain_network(double_precision):
    """Value and gradient as of contiguous memory and ReLUs that are not in place."""
    fast = atari_agent(atari_args()).online
    fast.draw_noise()
    plain = copy.deepcopy(fast).to(memory_format=torch.contiguous_format)
    for number, layer in enumerate(plain.convs):
        if isinstance(layer, torch.nn.ReLU):
            plain.convs[number] = torch.nn.ReLU()
    obs = torch.rand(4, 4, 28, 28)
    layouts = [obs.contiguous(memory_format=torch.channels_last), obs]
    for network, pixels in zip((fast, plain), layouts):
        out = network(pixels).flatten(1)  # (B, actions * atoms)
        (out[:, :8] * network.state(pixels)).sum().backward()
    assert torch.allclose(fast(layouts[0]), plain(layouts[1]), atol=1e-12)
    for (name, ours), (_, theirs) in zip(fast.named_parameters(), plain.named_parameters()):
        assert ours.grad.abs().sum() > 0, name
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-10), name


# --------------------------------------------------------------------------------------- targets
@pytest.mark.quick
@pytest.mark.parametrize("seed", range(5))
def test_projection_equals_a_loop_over_atoms_and_conserves_mass(seed):
    torch.manual_seed(seed)
    support = torch.linspace(-3, 3, 7, dtype=torch.float64)
    probabilities = torch.rand(6, 7, dtype=torch.float64).softmax(1)
    rewards = torch.tensor([0.0, 1.0, -2.5, 9.0, -9.0, 0.3], dtype=torch.float64)
    discounts = torch.tensor([0.9, 0.0, 0.5, 0.9, 0.9, 1.0], dtype=torch.float64)
    expected = torch.zeros(6, 7, dtype=torch.float64)
    for b in range(6):
        for i in range(7):
            moved = (rewards[b] + discounts[b] * support[i]).item()
            place = min(3.0, max(-3.0, moved)) + 3
            low = math.floor(place)
            high = math.ceil(place)
            if low == high:
                expected[b, low] += probabilities[b, i]
            else:
                expected[b, low] += probabilities[b, i] * (high - place)
                expected[b, high] += probabilities[b, i] * (place - low)
    projected = atari.project_distribution(probabilities, rewards, discounts, support)
    assert torch.allclose(projected, expected, atol=1e-12)
    assert torch.allclose(projected.sum(1), torch.ones(6, dtype=torch.float64))


def rl_batch(size=5):
    torch.manual_seed(1)
    obs, next_obs, next_obs_target = torch.rand(3, size, 4, 28, 28)
    actions = torch.arange(size) % 3
    discounts = torch.full((size,), 0.9**3)
    discounts[::2] = 0.0
    return obs, actions, torch.randn(size), discounts, next_obs, next_obs_target


def mooss_batch(agent):
    """Random masked observations, keys and actions of four sequences, three of which end."""
    torch.manual_seed(5)
    valid = torch.arange(8) < torch.tensor([8, 3, 5, 1])[:, None]
    actions = F.one_hot(torch.randint(agent.num_actions, (4, 8)), agent.num_actions).float()
    return [
        torch.rand(32, 4, 28, 28), torch.randn(32, 8), actions, torch.randn(4, 8, 1), valid,
        torch.rand(4)]


def shaken_agent(**changes):
    """An agent whose target differs from its online network, with noise in both."""
    agent = atari_agent(atari_args(**changes))
    agent.online.draw_noise()
    agent.target.draw_noise()
    for parameter in agent.target.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return agent


def dueling(network, obs):
    """Value and advantages put together by a loop over the three actions."""
    x = network.features(obs)
    advantage = network.advantage(x, True).view(-1, 3, network.atoms)
    value = network.value(x, True)
    mean = sum(advantage[:, action] for action in range(3)) / 3
    return torch.stack([value + advantage[:, action] - mean for action in range(3)], 1)


@pytest.mark.quick
def test_dueling_double_distributional_loss_equals_a_hand_computation():
    agent = shaken_agent()
    obs, actions, returns, discounts, next_obs, next_obs_target = rl_batch()
    losses, priorities, q = agent.rl_loss(
        obs, actions, returns, discounts, next_obs, next_obs_target)
    support = torch.linspace(-10, 10, 11)
    with torch.no_grad():
        chooser = dueling(agent.online, next_obs).softmax(2)
        judge = dueling(agent.target, next_obs_target).softmax(2)
        now = dueling(agent.online, obs).softmax(2)
    for i in range(5):
        # The online network chooses, the target network judges.
        values = [(chooser[i, action] * support).sum().item() for action in range(3)]
        best = values.index(max(values))
        target = atari.project_distribution(
            judge[i, best][None], returns[i:i + 1], discounts[i:i + 1], support)[0]
        prediction = now[i, actions[i]]
        cross_entropy = -(target * prediction.log()).sum().item()
        kl = sum((t * (t / p).log()).item() for t, p in zip(target, prediction) if t > 0)
        assert losses[i].item() == pytest.approx(cross_entropy, rel=1e-4)
        assert priorities[i].item() == pytest.approx(kl, rel=1e-3, abs=1e-4)
    assert q.item() == pytest.approx((now * support).sum(2).mean().item(), rel=1e-3, abs=1e-5)


def test_expected_value_loss_equals_a_hand_computation():
    """Without C51 and dueling: a Huber loss on the double-DQN target, the TD error as priority."""
    agent = shaken_agent(distributional=False, dueling=False)
    assert agent.online.value is None and agent.online.atoms == 1
    obs, actions, returns, discounts, next_obs, next_obs_target = rl_batch()
    returns[0] = 3.0  # beyond the quadratic part of the loss
    losses, priorities, _ = agent.rl_loss(
        obs, actions, returns, discounts, next_obs, next_obs_target)
    with torch.no_grad():
        best = agent.online(next_obs)[..., 0].argmax(1)
        judged = agent.target(next_obs_target)[..., 0]
        now = agent.online(obs)[..., 0]
    for i in range(5):
        target = returns[i] + discounts[i] * judged[i, best[i]]
        error = (now[i, actions[i]] - target).abs().item()
        huber = 0.5 * error**2 if error < 1 else error - 0.5
        assert losses[i].item() == pytest.approx(huber, rel=1e-3, abs=1e-6)
        assert priorities[i].item() == pytest.approx(error, rel=1e-3, abs=1e-6)
    assert priorities.min() < 1 < priorities.max()


def test_no_gradient_reaches_the_target_or_the_argmax():
    agent = shaken_agent()
    obs, actions, returns, discounts, next_obs, next_obs_target = rl_batch()
    next_obs.requires_grad_()
    next_obs_target.requires_grad_()
    losses, priorities, q = agent.rl_loss(
        obs, actions, returns, discounts, next_obs, next_obs_target)
    losses.sum().backward()
    assert not priorities.requires_grad and not q.requires_grad
    assert next_obs.grad is None and next_obs_target.grad is None
    assert all(parameter.grad is None for parameter in agent.target.parameters())
    assert all(parameter.grad is not None for parameter in agent.rl_parameters)


# --------------------------------------------------------------------------------------- updates
@pytest.mark.quick
@pytest.mark.parametrize("changes", [
    dict(),
    dict(noisy=False),
    dict(distributional=False),
    dict(dueling=False),
    dict(aux_is_weights=False),
    dict(decoder_inputs="none"),
    dict(decoder_inputs="s"),
    dict(decoder_inputs="sar"),
    dict(mask_type="cube"),
    dict(mask_ratio=0.0),
    dict(walk_connectivity=6, walk_root="fixed"),
    dict(temporal_window=0),
    dict(target_ema=0.9, target_update_period=2),
    dict(share_mask=True),
    dict(optimizer="adamw"),
    dict(amp="bf16"),
    dict(level_reduction="sum"),
    dict(crop_per_sequence=True),
    dict(normalize_embeddings=False),
    dict(augmentations=()),
    dict(multi_step=12),
    dict(multi_step=1),
], ids=str)
def test_every_variant_updates_with_finite_losses(changes):
    args = atari_args(**changes)
    agent = atari_agent(args)
    replay = atari_replay(args)
    before = copy.deepcopy(agent.state_dict())
    priorities = replay.priorities.clone()
    for update in range(3):
        agent.update(replay, update, 0.5, log=True)
    for key in ("losses/rl", "losses/mooss"):
        assert math.isfinite(float(agent.metrics[key]))
    assert not torch.equal(priorities, replay.priorities)
    after = agent.state_dict()
    assert [name for name in before if torch.equal(before[name], after[name])] == []


def test_an_update_writes_back_the_priorities_of_its_rows_alone():
    args = atari_args()
    agent = atari_agent(args)
    replay = atari_replay(args)
    rows, weights = replay.sample(args.batch_size, 0.5)
    replay.sample = lambda count, beta: (rows, weights)
    found = []
    loss = agent.rl_loss
    agent.rl_loss = lambda *batch: found.append(loss(*batch)) or found[0]
    expected = replay.priorities.clone()
    agent.update(replay, 0, 0.5, log=False)
    for row, priority in zip(rows.tolist(), found[0][1].tolist()):
        expected[row % replay.capacity] = max(priority, 1e-6) ** args.priority_exponent
    assert torch.allclose(replay.priorities, expected, rtol=1e-5)


def test_no_noise_and_no_dueling_leave_nothing_of_them():
    names = atari_agent(atari_args(noisy=False)).state_dict()
    assert not any("sigma" in name or "noise" in name for name in names)
    names = atari_agent(atari_args(dueling=False)).state_dict()
    assert not any("value" in name for name in names)


def test_base_has_nothing_of_mooss():
    """No modules, no metrics, and no frames beyond the RL batch's."""
    args = atari_args(aux_weight=0.0)
    base = atari_agent(args)
    parts = ("decoder", "projection", "bilinear")
    assert not any(part in name for name in base.state_dict() for part in parts)
    replay = atari_replay(args)
    lengths = []
    fetch = replay.frames_of
    replay.frames_of = lambda rows, length: lengths.append(length) or fetch(rows, length)
    base.update(replay, 0, 0.4, log=True)
    assert lengths == [1, 1]
    assert "losses/rl" in base.metrics
    assert not any("mooss" in key for key in base.metrics)


def test_gradients_are_clipped_apart():
    args = atari_args(max_grad_norm=1e-3)
    agent = atari_agent(args)
    agent.update(atari_replay(args), 0, 0.5, log=True)
    for parameters in (agent.rl_parameters, agent.aux_parameters):
        norms = [parameter.grad.norm() for parameter in parameters if parameter.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(norms)).item()
        assert norm == pytest.approx(1e-3, rel=0.01)
    together = {id(parameter) for parameter in [*agent.rl_parameters, *agent.aux_parameters]}
    trained = {id(parameter) for parameter in agent.parameters() if parameter.requires_grad}
    assert together == trained
    assert len(together) == len(agent.rl_parameters) + len(agent.aux_parameters)


@pytest.mark.quick
def test_steps_after_an_episodes_end_do_not_count():
    """A3: what invalid steps show changes neither the loss nor any gradient."""
    agent = atari_agent(atari_args())
    batch = mooss_batch(agent)
    invalid = ~batch[4].flatten()
    results = []
    for changed in (False, True):
        if changed:
            batch[0][invalid] = torch.rand(int(invalid.sum()), 4, 28, 28)
            batch[1][invalid] = 0.5
        agent.zero_grad()
        loss, _ = agent.mooss_loss(*batch)
        loss.backward()
        gradients = [parameter.grad.clone() for parameter in agent.aux_parameters]
        results.append((loss.item(), gradients))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(results[0][1], results[1][1]))
    batch[0][0] = torch.rand(4, 28, 28)  # a step that is valid
    assert agent.mooss_loss(*batch)[0].item() != pytest.approx(results[0][0], rel=1e-6)


@pytest.mark.quick
def test_one_backward_carries_both_losses():
    """The encoder's gradient is that of L_rl + lambda * L_MOOSS: it changes with lambda."""
    gradients = []
    for weight in (0.0, 0.1, 5.0):
        args = atari_args(aux_weight=weight, max_grad_norm=1e6, augmentations=())
        agent = atari_agent(args)
        replay = atari_replay(args)
        torch.manual_seed(4)
        agent.update(replay, 0, 0.5, log=False)
        gradients.append(agent.online.convs[0].weight.grad.clone())
    small = (gradients[1] - gradients[0]).norm().item()
    large = (gradients[2] - gradients[0]).norm().item()
    assert small > 1e-6
    assert large == pytest.approx(50 * small, rel=0.02)


# --------------------------------------------------------------------------------------- metrics
@pytest.mark.parametrize("aux_weight", [0.1, 0.0])
def test_encoder_metrics_show_a_collapse(aux_weight):
    """Base has no states: the spread is that of its features."""
    agent = atari_agent(atari_args(aux_weight=aux_weight))
    obs = torch.rand(6, 4, 28, 28)
    with torch.no_grad():
        states = agent.online.state(obs) if aux_weight else agent.online.features(obs)
    metrics = agent.encoder_metrics(obs)
    spread = states.std(0).mean().item()
    assert float(metrics["encoder/state_std"]) == pytest.approx(spread, rel=1e-5)
    assert 0 <= float(metrics["encoder/dead_features"]) < 0.5
    agent.online.convs[-3].bias.data.fill_(-1e6)
    assert float(agent.encoder_metrics(obs)["encoder/dead_features"]) == 1.0


def test_the_logged_mooss_loss_has_no_importance_weights():
    """It would fall with their exponent."""
    agent = atari_agent(atari_args())
    batch = mooss_batch(agent)
    valid = batch[4]
    with torch.no_grad():
        weighted, similarity = agent.mooss_loss(*batch)
        plain, _ = agent.mooss_loss(*batch[:5], torch.ones(4))
    metrics = agent.mooss_metrics(similarity, valid, 3)
    assert float(metrics["losses/mooss"]) == pytest.approx(plain.item(), rel=1e-5)
    assert float(metrics["losses/mooss"]) != pytest.approx(weighted.item(), rel=1e-2)
    assert float(metrics["mooss/valid_fraction"]) == pytest.approx(17 / 32)
    masked = agent.masks(3).float().mean().item()
    assert float(metrics["mooss/mask_fraction"]) == pytest.approx(masked)
    right = 0
    for query in valid.flatten().nonzero().flatten().tolist():
        best = max(valid.flatten().nonzero().flatten().tolist(),
                   key=lambda key: similarity[query, key].item())
        right += best == query
    assert float(metrics["mooss/top1_accuracy"]) == pytest.approx(right / 17)
