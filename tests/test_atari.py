"""Rainbow: replay, returns, priorities, noise, distributions and targets against plain computations."""

import copy
import math
import time

import numpy as np
import pytest
import torch

import mooss_common as common
import rainbow_mooss_atari as atari
from conftest import filled_atari_replay, tiny_atari_agent, tiny_atari_args
from rainbow_mooss_atari import (NoisyLinear, SequenceReplay, SumTree, project_distribution, random_crop,
                                 random_intensity, stack_frames)

CPU = torch.device("cpu")


# ---------------------------------------------------------------------------------------------- C51
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
            place = (min(3.0, max(-3.0, (rewards[b] + discounts[b] * support[i]).item())) + 3) / 1.0
            low, high = math.floor(place), math.ceil(place)
            if low == high:
                expected[b, low] += probabilities[b, i]
            else:
                expected[b, low] += probabilities[b, i] * (high - place)
                expected[b, high] += probabilities[b, i] * (place - low)
    projected = project_distribution(probabilities, rewards, discounts, support)
    assert torch.allclose(projected, expected, atol=1e-12)
    assert torch.allclose(projected.sum(1), torch.ones(6, dtype=torch.float64))


# ---------------------------------------------------------------------------------------------- replay
def random_episodes(seed, capacity, steps, frame_stack=4, seq_len=5, multi_step=3):
    """A replay and the plain list of its rows, with short episodes so that ends fall everywhere."""
    rng = np.random.default_rng(seed)
    replay = SequenceReplay(capacity, (1, 6, 6), frame_stack, seq_len, multi_step, CPU)
    rows, episode = [], 0
    for _ in range(steps):
        row = (rng.integers(1, 256, (1, 6, 6), dtype=np.uint8), int(rng.integers(4)), float(rng.normal()),
               bool(rng.random() < 0.15))
        replay.add(*row)
        rows.append((*row, episode))
        episode += row[3]
    return replay, rows


def drawable(rows, capacity, frame_stack=4, ahead=4):
    oldest = max(0, len(rows) - capacity)
    first = oldest + frame_stack - 1 if oldest > 0 else 0
    return list(range(first, len(rows) - ahead))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("capacity,steps", [(300, 120), (40, 40), (40, 41), (40, 333)])
def test_replay_equals_plain_lists(seed, capacity, steps):
    """Which rows can be drawn; n-step returns cut at terminals (A2); sequences, their validity (A3), their stacks."""
    replay, rows = random_episodes(seed, capacity, steps)
    expected = drawable(rows, capacity)
    leaves = replay.priorities.sums[replay.priorities.leaves:][:capacity]
    assert leaves.nonzero().flatten().tolist() == sorted(row % capacity for row in expected)
    at = torch.tensor(expected)
    returns, going = replay.returns(at, 0.9)
    actions, rewards, valid = replay.sequences(at)
    frames = replay.frames_for(at, 5)
    for i, start in enumerate(expected):
        value, ended = 0.0, False
        for k in range(3):
            value += 0.9**k * rows[start + k][2]
            ended = rows[start + k][3]
            if ended:
                break
        assert returns[i].item() == pytest.approx(value, abs=1e-5) and going[i].item() == (not ended)
        for j in range(5):
            assert actions[i, j] == rows[start + j][1] and rewards[i, j] == np.float32(rows[start + j][2])
            assert valid[i, j] == (rows[start + j][4] == rows[start][4])
            if valid[i, j]:
                for k in range(4):
                    row = start + j - 3 + k
                    same_episode = row >= 0 and rows[row][4] == rows[start][4]
                    plain = rows[row][0] if same_episode else np.zeros((1, 6, 6), np.uint8)
                    assert (frames[i, j + k].numpy() == plain).all()


def test_sum_tree_samples_in_proportion_to_priorities():
    torch.manual_seed(0)
    tree = SumTree(50, CPU)
    priorities = torch.rand(50, dtype=torch.float64)
    priorities[::7] = 0
    tree.write(torch.arange(50), priorities)
    slots, probability = tree.sample(200_000)
    counts = torch.bincount(slots, minlength=50).double()
    expected = 200_000 * priorities / priorities.sum()
    assert (counts[::7] == 0).all()
    live = expected > 0
    chi_square = ((counts - expected)[live] ** 2 / expected[live]).sum().item()
    assert chi_square < live.sum() + 5 * math.sqrt(2 * live.sum())
    assert torch.allclose(probability, priorities[slots] / priorities.sum())


def test_sum_tree_stays_a_tree_of_sums():
    tree, rng, plain = SumTree(37, CPU), np.random.default_rng(0), np.zeros(37)
    for _ in range(50):
        slots = rng.choice(37, size=5, replace=False)
        values = rng.random(5)
        plain[slots] = values
        tree.write(torch.from_numpy(slots), torch.from_numpy(values))
    assert tree.sums[1].item() == pytest.approx(plain.sum())
    inner = torch.arange(1, tree.leaves)
    assert torch.equal(tree.sums[inner], tree.sums[2 * inner] + tree.sums[2 * inner + 1])


def test_importance_weights_equal_the_formula():
    torch.manual_seed(0)
    replay, rows = random_episodes(0, 300, 120)
    at = torch.tensor(drawable(rows, 300))
    raw = torch.rand(len(at)) * 3
    replay.set_priorities(at, raw, exponent=0.5)
    drawn, weights = replay.sample(64, beta=0.6)
    p = dict(zip(at.tolist(), (raw.double() ** 0.5 / (raw.double() ** 0.5).sum()).tolist()))
    plain = np.array([(len(at) * p[row]) ** -0.6 for row in drawn.tolist()])
    assert np.allclose(weights.numpy(), plain / plain.max(), rtol=1e-5)


def test_priorities_are_clamped_and_raised():
    replay, rows = random_episodes(0, 300, 60)
    at = torch.tensor(drawable(rows, 300)[:3])
    replay.set_priorities(at, torch.tensor([0.0, 4.0, 1e9]), exponent=0.5)
    leaves = replay.priorities.sums[replay.priorities.leaves + at]
    assert torch.allclose(leaves, torch.tensor([1e-3, 2.0, 1e3], dtype=torch.float64))


def test_new_rows_start_with_priority_one():
    replay, rows = random_episodes(1, 300, 60)
    leaves = replay.priorities.sums[replay.priorities.leaves:]
    assert set(leaves.unique().tolist()) == {0.0, 1.0}


def test_100k_steps_take_at_most_three_quarters_of_a_gigabyte():
    replay = SequenceReplay(100_000, (1, 84, 84), 4, 16, 10, torch.device("meta"))
    assert replay.frames.dtype == torch.uint8 and common.replay_bytes(replay) <= 0.75e9


def test_sampling_a_batch_from_a_full_replay_takes_at_most_10_ms():
    """32 sequences of 16 with returns, importance weights and priorities written back, from 100,000 steps."""
    replay = SequenceReplay(100_000, (1, 84, 84), 4, 16, 10, CPU)
    replay.frames[::1000] = 7
    replay.rows = 100_000
    replay.priorities.write(torch.arange(99_985), torch.rand(99_985, dtype=torch.float64))

    def batch():
        rows, weights = replay.sample(32, 0.5)
        parts = (replay.returns(rows, 0.99), replay.sequences(rows), replay.frames_for(rows, 16),
                 replay.frames_for(rows + 10, 1))
        replay.set_priorities(rows, weights, 0.5)
        return parts

    assert batch()[2].shape == (32, 19, 1, 84, 84)
    times = [1.0]
    for _ in range(200):
        if min(times) <= 0.01:
            break
        began = time.perf_counter()
        batch()
        times.append(time.perf_counter() - began)
    print(f"{1000 * min(times):.2f} ms a batch")
    assert min(times) <= 0.01


def augmented(frames, args):
    return random_intensity(random_crop(stack_frames(frames, args), args), args)


def test_crop_takes_windows_of_the_replicated_frame_and_draws_them_anew():
    args = tiny_atari_args(augmentations=("crop",))
    replay = filled_atari_replay(args)
    rows, _ = replay.sample(6, 0.4)
    frames = replay.frames_for(rows, 8)
    obs = (augmented(frames, args) * 255).round().view(6, 8, 4, 28, 28)
    padded = torch.nn.functional.pad(frames[:, :, 0].float(), (4, 4, 4, 4), mode="replicate")
    offsets = set()
    for b in range(6):
        for i in range(8):
            found = [(y, x) for y in range(9) for x in range(9)
                     if torch.equal(padded[b, i:i + 4, y:y + 28, x:x + 28], obs[b, i])]
            assert found
            offsets.add(found[0])
    assert len(offsets) > 5
    assert not torch.equal(augmented(frames, args), augmented(frames, args))


def test_without_augmentation_observations_are_the_stacks():
    args = tiny_atari_args(augmentations=())
    replay = filled_atari_replay(args)
    rows, _ = replay.sample(3, 0.4)
    frames = replay.frames_for(rows, 2)
    obs = augmented(frames, args).view(3, 2, 4, 28, 28) * 255
    assert torch.allclose(obs[:, 0], frames[:, :4, 0].float()) and torch.allclose(obs[:, 1], frames[:, 1:, 0].float())


# ---------------------------------------------------------------------------------------------- networks
def test_noise_is_rank_one_and_off_when_not_asked_for():
    torch.manual_seed(0)
    layer = NoisyLinear(20, 10, 0.5)
    layer.draw_noise()
    x = torch.eye(20)
    noise = (layer(x) - layer.bias - layer.bias_sigma * layer.noise_out).T - layer.weight
    noise = noise / layer.weight_sigma
    assert torch.linalg.matrix_rank(noise, rtol=1e-3) == 1
    assert torch.allclose(noise, torch.outer(layer.noise_out, layer.noise_in), atol=1e-4)
    assert torch.equal(layer(x, noisy=False), torch.nn.functional.linear(x, layer.weight, layer.bias))
    assert layer.weight_sigma.unique().item() == pytest.approx(0.5 / math.sqrt(20))
    assert layer.bias_sigma.unique().item() == pytest.approx(0.5 / math.sqrt(10))
    bound = 1 / math.sqrt(20)
    assert 0.9 * bound < layer.weight.abs().max() <= bound


def test_noise_has_the_factorised_distribution():
    torch.manual_seed(0)
    layer = NoisyLinear(20_000, 3, 0.5)
    layer.draw_noise()
    squared = layer.noise_in.sign() * layer.noise_in**2  # f(x) = sign(x) sqrt|x| undone
    assert abs(squared.mean()) < 0.05 and squared.std().item() == pytest.approx(1, abs=0.03)


def test_noise_is_drawn_once_per_update_and_copied_with_the_target():
    args = tiny_atari_args()
    agent, replay = tiny_atari_agent(args), filled_atari_replay(args)
    draws, draw = [], NoisyLinear.draw_noise
    try:
        NoisyLinear.draw_noise = lambda layer: draws.append(layer) or draw(layer)
        agent.update(replay, 0, 0.4, log=False)
    finally:
        NoisyLinear.draw_noise = draw
    layers = [module for module in agent.online.modules() if isinstance(module, NoisyLinear)]
    assert draws == layers and len(layers) == 4
    for (name, online), target in zip(agent.online.state_dict().items(), agent.target.state_dict().values()):
        assert torch.equal(online, target), name  # hard copy every update, noise included
    noise = layers[0].noise_in.clone()
    agent.update(replay, 1, 0.4, log=False)
    assert not torch.equal(noise, layers[0].noise_in)


def test_acting_is_noisy_in_training_and_not_in_evaluation():
    args = tiny_atari_args(noisy_std=5.0)
    agent = tiny_atari_agent(args)
    obs = np.random.default_rng(0).integers(0, 256, (40, 4, 1, 28, 28), dtype=np.uint8)
    quiet = agent.act(obs)
    agent.online.draw_noise()
    assert (agent.act(obs) == quiet).all() and (agent.act(obs, noisy=True) != quiet).any()


def test_features_are_renormalised_and_the_gradient_into_the_head_is_scaled():
    args = tiny_atari_args()
    network = tiny_atari_agent(args).online
    obs = torch.rand(5, 4, 28, 28)
    features = network.features(obs)
    assert torch.allclose(features.amin(1), torch.zeros(5)) and torch.allclose(features.amax(1), torch.ones(5))
    scaled = torch.autograd.grad(network(obs).sum(), network.convs[0].weight)[0]
    x = network.features(obs)
    out = network.advantage(x, True).view(5, 3, 11)
    plain = (out - out.mean(1, keepdim=True) + network.value(x, True).view(5, 1, 11)).sum()
    assert torch.allclose(scaled, torch.autograd.grad(plain, network.convs[0].weight)[0] / math.sqrt(2), rtol=1e-4,
                          atol=1e-7)


def test_paper_network_sizes():
    args = atari.resolve_args(atari.Args(env_id="Pong"))
    agent = atari.Agent(args, (4, 1, 84, 84), 6, CPU)
    assert agent.online.features(torch.zeros(1, 4, 84, 84)).shape == (1, 64 * 7 * 7)
    assert agent.online(torch.zeros(1, 4, 84, 84)).shape == (1, 6, 51)
    assert agent.online.projection[0].weight.shape == (64, 3136)
    assert agent.optimizers["all"].defaults["betas"] == (0.9, 0.999)


# ---------------------------------------------------------------------------------------------- targets
def a_batch(size=5):
    torch.manual_seed(1)
    obs, following, other = (torch.rand(size, 4, 28, 28) for _ in range(3))
    discounts = torch.full((size,), 0.9**3)
    discounts[::2] = 0.0
    return obs, torch.arange(size) % 3, torch.randn(size), discounts, following, other


def shaken_agent(**changes):
    """An agent whose target differs from its online network, with noise in both."""
    agent = tiny_atari_agent(tiny_atari_args(**changes))
    agent.online.draw_noise()
    agent.target.draw_noise()
    for parameter in agent.target.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return agent


def dueling(network, obs):
    x = network.features(obs)
    advantage, value = network.advantage(x, True).view(-1, 3, network.atoms), network.value(x, True)[:, None]
    mean = sum(advantage[:, b] for b in range(3)) / 3
    return torch.stack([value[:, 0] + advantage[:, a] - mean for a in range(3)], 1)


def test_dueling_double_distributional_loss_equals_a_hand_computation():
    agent = shaken_agent()
    obs, actions, returns, discounts, following, other = a_batch()
    losses, priorities, _ = agent.rl_loss(obs, actions, returns, discounts, following, other)
    support = torch.linspace(-10, 10, 11)
    with torch.no_grad():
        chooser, judge, now = (dueling(net, x).softmax(2) for net, x in
                               ((agent.online, following), (agent.target, other), (agent.online, obs)))
        for i in range(5):
            best = max(range(3), key=lambda a: (chooser[i, a] * support).sum().item())  # the online network chooses
            target = project_distribution(judge[i, best][None], returns[i:i + 1], discounts[i:i + 1], support)[0]
            prediction = now[i, actions[i]]
            cross_entropy = -(target * prediction.log()).sum().item()
            kl = sum((t * (t / p).log()).item() for t, p in zip(target, prediction) if t > 0)
            assert losses[i].item() == pytest.approx(cross_entropy, rel=1e-4)
            assert priorities[i].item() == pytest.approx(kl, rel=1e-3, abs=1e-4)


def test_expected_value_loss_equals_a_hand_computation():
    """--no-distributional --no-dueling: a Huber loss on the double-DQN target, the TD error as priority."""
    agent = shaken_agent(distributional=False, dueling=False)
    assert agent.online.value is None and agent.online.atoms == 1
    obs, actions, returns, discounts, following, other = a_batch()
    losses, priorities, _ = agent.rl_loss(obs, actions, returns, discounts, following, other)
    with torch.no_grad():
        best = agent.online(following)[..., 0].argmax(1)
        for i in range(5):
            target = returns[i] + discounts[i] * agent.target(other)[i, best[i], 0]
            error = (agent.online(obs)[i, actions[i], 0] - target).abs().item()
            assert losses[i].item() == pytest.approx(0.5 * error**2 if error < 1 else error - 0.5, rel=1e-3, abs=1e-6)
            assert priorities[i].item() == pytest.approx(error, rel=1e-3, abs=1e-6)


def test_no_gradient_reaches_the_target_or_the_argmax():
    agent = shaken_agent()
    losses, priorities, q = agent.rl_loss(*a_batch())
    losses.sum().backward()
    assert not priorities.requires_grad and not q.requires_grad
    assert all(parameter.grad is None for parameter in agent.target.parameters())


# ---------------------------------------------------------------------------------------------- updates
@pytest.mark.parametrize("changes", [
    {}, dict(noisy=False), dict(distributional=False), dict(dueling=False), dict(aux_is_weights=False),
    dict(decoder_inputs="none"), dict(decoder_inputs="s"), dict(decoder_inputs="sar"), dict(mask_type="cube"),
    dict(mask_ratio=0.0), dict(temporal_window=0), dict(target_ema=0.9, target_update_period=2), dict(share_mask=True),
    dict(optimizer="adamw"), dict(amp="bf16"), dict(level_reduction="sum"), dict(crop_per_sequence=True),
    dict(normalize_embeddings=False), dict(augmentations=()), dict(multi_step=12), dict(multi_step=1)])
def test_every_variant_updates_with_finite_losses(changes):
    args = tiny_atari_args(**changes)
    agent, replay = tiny_atari_agent(args), filled_atari_replay(args)
    before = copy.deepcopy(agent.state_dict())
    priorities = replay.priorities.sums.clone()
    for update in range(3):
        agent.update(replay, update, 0.5, log=True)
    assert all(math.isfinite(float(agent.metrics[key])) for key in ("losses/rl", "losses/mooss"))
    assert not torch.equal(priorities, replay.priorities.sums)
    after = agent.state_dict()
    still = [name for name in before if torch.equal(before[name], after[name])]
    assert still == [], still


def test_switches_leave_nothing_of_what_they_turn_off():
    names = tiny_atari_agent(tiny_atari_args(noisy=False)).state_dict()
    assert not any("sigma" in name or "noise" in name for name in names)
    names = tiny_atari_agent(tiny_atari_args(dueling=False)).state_dict()
    assert not any("value" in name for name in names)
    base = tiny_atari_agent(tiny_atari_args(aux_weight=0.0))
    assert not any("decoder" in name or "projection" in name or "bilinear" in name for name in base.state_dict())
    replay = filled_atari_replay(base.args)
    lengths, fetch = [], replay.frames_for
    replay.frames_for = lambda rows, length: lengths.append(length) or fetch(rows, length)
    base.update(replay, 0, 0.4, log=True)
    assert lengths == [1, 1] and not any("mooss" in key for key in base.metrics)


def test_gradients_are_clipped_apart():
    args = tiny_atari_args(max_grad_norm=1e-3)
    agent, replay = tiny_atari_agent(args), filled_atari_replay(args)
    agent.update(replay, 0, 0.5, log=True)
    for parameters in (agent.rl_parameters, agent.aux_parameters):
        norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in parameters if p.grad is not None]))
        assert norm.item() == pytest.approx(1e-3, rel=0.01)
    together = {id(p) for p in agent.rl_parameters} | {id(p) for p in agent.aux_parameters}
    assert len(together) == sum(p.requires_grad for p in agent.parameters())


def test_steps_after_an_episodes_end_do_not_count():
    """A3: what invalid steps show changes neither the loss nor any gradient."""
    args = tiny_atari_args()
    agent = tiny_atari_agent(args)
    torch.manual_seed(0)
    query, keys = torch.rand(32, 4, 28, 28), torch.randn(32, 8)
    actions, rewards, weights = torch.rand(4, 8, 3), torch.rand(4, 8, 1), torch.rand(4)
    valid = torch.arange(8) < torch.tensor([8, 3, 5, 1])[:, None]
    invalid = ~valid.flatten()
    results = []
    for changed in (False, True):
        if changed:
            query[invalid], keys[invalid] = torch.rand(int(invalid.sum()), 4, 28, 28), 0.5
        agent.zero_grad()
        loss, _ = agent.mooss_loss(query, keys, actions, rewards, valid, weights)
        loss.backward()
        results.append((loss.item(), [p.grad.clone() for p in agent.aux_parameters]))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(results[0][1], results[1][1]))


def test_one_backward_carries_both_losses():
    """The encoder's gradient is that of L_rl + lambda * L_MOOSS: it changes with lambda."""
    grads = []
    for weight in (0.0, 0.1, 5.0):
        args = tiny_atari_args(aux_weight=weight, max_grad_norm=1e9, augmentations=())
        agent, replay = tiny_atari_agent(args), filled_atari_replay(args)
        torch.manual_seed(4)
        agent.update(replay, 0, 0.5, log=False)
        grads.append(agent.online.convs[0].weight.grad.clone())
    assert (grads[2] - grads[0]).norm() == pytest.approx(50 * (grads[1] - grads[0]).norm().item(), rel=0.02)


def test_compiled_losses_equal_eager_ones_in_value_and_gradient():
    eager = shaken_agent()
    compiled = tiny_atari_agent(tiny_atari_args(compile=True))
    compiled.load_state_dict(eager.state_dict())
    torch.manual_seed(5)
    valid = torch.arange(8) < torch.tensor([8, 3, 5, 1])[:, None]
    mooss = (torch.rand(32, 4, 28, 28), torch.randn(32, 8), torch.rand(4, 8, 3), torch.rand(4, 8, 1), valid,
             torch.rand(4))
    for name, batch in (("rl_loss", a_batch()), ("mooss_loss", mooss)):
        results = []
        for agent in (eager, compiled):
            agent.zero_grad()
            value = getattr(agent, name)(*batch)[0].mean()
            value.backward()
            results.append((value.item(), [torch.zeros(1) if p.grad is None else p.grad for p in agent.parameters()]))
        assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
        assert sum(float(grad.abs().sum()) > 0 for grad in results[0][1]) > 5
        assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(results[0][1], results[1][1]))


@pytest.mark.parametrize("aux_weight", [0.1, 0.0])
def test_encoder_metrics_show_a_collapse(aux_weight):
    """Base has no states: the spread is that of its features."""
    agent = tiny_atari_agent(tiny_atari_args(aux_weight=aux_weight))
    obs = torch.rand(6, 4, 28, 28)
    with torch.no_grad():
        states = agent.online.state(obs) if aux_weight else agent.online.features(obs)
    metrics = agent.encoder_metrics(obs)
    assert float(metrics["encoder/state_std"]) == pytest.approx(states.std(0).mean().item(), rel=1e-5)
    assert 0 <= float(metrics["encoder/dead_features"]) < 0.5
    agent.online.convs[-3].bias.data.fill_(-1e6)
    assert float(agent.encoder_metrics(obs)["encoder/dead_features"]) == 1.0
