"""SAC and MOOSS inside the DMC agent: targets by hand, gradients, schedules, copies, acting."""

import copy
import dataclasses
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import mooss_common as common
import sac_mooss_dmc as dmc
from helpers import tiny
from helpers.tiny import dmc_agent, dmc_args, dmc_replay

CPU = torch.device("cpu")


def a_batch(args, action_dim=1):
    """Observations, actions, rewards, terminations, next observations, noise."""
    torch.manual_seed(1)
    shape = (args.batch_size, 9, args.image_size, args.image_size)
    obs = torch.rand(shape)
    action = torch.rand(args.batch_size, action_dim)
    reward = torch.rand(args.batch_size)
    terminated = torch.arange(args.batch_size) % 2 == 0
    next_obs = torch.rand(shape)
    noise = torch.randn(args.batch_size, action_dim)
    return obs, action, reward, terminated, next_obs, noise


def a_mooss_batch(args, agent, action_dim=1):
    """Masked observations, keys of unmasked ones, actions, rewards."""
    torch.manual_seed(2)
    shape = (args.aux_batch_size * args.seq_len, 9, args.image_size, args.image_size)
    keys = agent.encode_keys(torch.rand(shape))
    masked_obs = torch.rand(shape) * ~agent.masks(0)
    actions = torch.rand(args.aux_batch_size, args.seq_len, action_dim)
    rewards = torch.rand(args.aux_batch_size, args.seq_len, 1)
    return masked_obs, keys, actions, rewards


def touched(module):
    """Names of the parameters that have a gradient."""
    return {
        name for name, parameter in module.named_parameters()
        if parameter.grad is not None and parameter.grad.abs().sum() > 0}


def parameter_pairs(*modules):
    return zip(*[module.parameters() for module in modules])


# ------------------------------------------------------------------------------------------ losses
def test_log_probability_equals_a_numerical_change_of_variables():
    agent = dmc_agent(dmc_args(), action_dim=2)
    features = torch.rand(5, agent.critic.encoder.feature_count)
    action, log_prob = agent.actor.sample(features, torch.randn(5, 2))
    mean, log_std = agent.actor(features)
    normal = torch.distributions.Normal(mean, log_std.exp())
    tanh = torch.distributions.TanhTransform()
    squashed = torch.distributions.TransformedDistribution(normal, tanh)
    assert (log_std > -10).all() and (log_std < 2).all()
    assert torch.allclose(log_prob[:, 0], squashed.log_prob(action).sum(1), atol=1e-3)


@pytest.mark.quick
def test_critic_loss_equals_a_hand_computation():
    """r + gamma * (min Q' - alpha log pi), cut at terminations, of target nets, online actor."""
    args = dmc_args(gamma=0.9, init_temperature=0.3)
    agent = dmc_agent(args)
    for parameter in agent.critic_target.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    obs, action, reward, terminated, next_obs, noise = a_batch(args)
    loss, _ = agent.critic_loss(obs, action, reward, terminated, next_obs, noise)
    expected = 0.0
    for i in range(args.batch_size):
        mean, log_std = agent.actor(agent.critic.encoder.convs(next_obs[i:i + 1]))
        before_tanh = mean + log_std.exp() * noise[i]
        next_action = torch.tanh(before_tanh)
        log_normal = torch.distributions.Normal(mean, log_std.exp()).log_prob(before_tanh)
        log_pi = (log_normal - torch.log(1 - next_action ** 2 + 1e-6)).sum().item()
        state = agent.critic_target.encoder(next_obs[i:i + 1])
        state_action = torch.cat([state, next_action], 1)
        q = min(head(state_action).item() for head in agent.critic_target.heads)
        target = reward[i].item()
        if not terminated[i]:
            target += 0.9 * (q - 0.3 * log_pi)
        state = agent.critic.encoder(obs[i:i + 1])
        state_action = torch.cat([state, action[i:i + 1]], 1)
        for head in agent.critic.heads:
            expected += (head(state_action).item() - target) ** 2 / args.batch_size
    assert loss.item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.quick
def test_actor_and_temperature_losses_equal_a_hand_computation():
    args = dmc_args(init_temperature=0.3)
    agent = dmc_agent(args, action_dim=2)
    obs, *_, noise = a_batch(args, action_dim=2)
    loss, outputs = agent.actor_loss(obs, noise)
    action, log_prob = agent.actor.sample(agent.critic.encoder.convs(obs), noise)
    q1, q2 = agent.critic(agent.critic.encoder(obs), action)
    actor_loss = (0.3 * log_prob - torch.minimum(q1, q2)).mean().item()
    alpha_loss = (0.3 * (-log_prob - (-2))).mean().item()
    assert outputs["losses/actor"].item() == pytest.approx(actor_loss, rel=1e-4)
    assert outputs["losses/alpha"].item() == pytest.approx(alpha_loss, rel=1e-4)
    assert outputs["sac/entropy"].item() == pytest.approx(-log_prob.mean().item(), rel=1e-4)
    assert loss.item() == pytest.approx(actor_loss + alpha_loss, rel=1e-4)


@pytest.mark.quick
@pytest.mark.parametrize("normalised", [True, False])
def test_mooss_loss_is_lambda_times_the_ranked_loss_of_a_bilinear_similarity(normalised):
    """sim(q, k) = q^T W k of queries as rows and keys as columns (D3)."""
    args = dmc_args(aux_weight=0.25, normalize_embeddings=normalised)
    agent = dmc_agent(args)
    masked_obs, keys, actions, rewards = a_mooss_batch(args, agent)
    loss, outputs = agent.mooss_loss(masked_obs, keys, actions, rewards)
    states = agent.critic.encoder(masked_obs).view(3, 8, 8)
    queries = agent.decoder(states, actions, rewards).flatten(0, 1)
    if normalised:
        queries = F.normalize(queries, dim=1, eps=1e-3)
        keys = F.normalize(keys, dim=1, eps=1e-3)
    similarity = torch.stack([
        torch.stack([query @ agent.bilinear @ key for key in keys]) for query in queries])
    ranked = dmc.temporal_contrastive_loss(similarity, args.seq_len, args.temporal_window)
    assert torch.allclose(outputs["similarity"], similarity, atol=1e-5)
    assert outputs["losses/mooss"].item() == pytest.approx(ranked.item(), rel=1e-4)
    assert loss.item() == pytest.approx(0.25 * ranked.item(), rel=1e-4)


# --------------------------------------------------------------------------------------- gradients
def test_mooss_loss_reaches_the_critics_encoder_and_not_the_actor():
    args = dmc_args()
    agent = dmc_agent(args)
    loss, outputs = agent.mooss_loss(*a_mooss_batch(args, agent))
    loss.backward()
    encoder = agent.critic.encoder
    assert outputs["similarity"].shape == (24, 24)
    assert touched(encoder) == {name for name, _ in encoder.named_parameters()}
    in_decoder = {"blocks.0.linear1.weight", "embed_action.weight", "head.2.weight"}
    assert touched(agent.decoder) >= in_decoder
    assert agent.bilinear.grad.abs().sum() > 0
    for module in (agent.actor, agent.critic.heads, agent.key_encoder, agent.critic_target):
        assert not touched(module)


def test_actor_step_moves_neither_convs_nor_critic():
    args = dmc_args(aux_weight=0.0, rl_lr=0.01)
    agent = dmc_agent(args)
    agent.optimizers["critic"].param_groups[0]["lr"] = 0.0
    before = copy.deepcopy(agent.state_dict())
    agent.update(dmc_replay(args), 0, log=True)
    after = agent.state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if name.startswith("actor.")} | {"log_alpha"}


def test_gradients_that_one_step_leaves_behind_do_not_enter_the_next():
    """The actor loss reaches the critic's heads, and two optimisers share the encoder."""
    args = dmc_args()
    replay = dmc_replay(args)
    agents = [dmc_agent(args) for _ in range(2)]
    for parameter in agents[1].parameters():
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, 1e3)
    for agent in agents:
        torch.manual_seed(3)
        agent.update(replay, 0, log=False)
    for (name, a), b in zip(agents[0].named_parameters(), agents[1].parameters()):
        assert torch.allclose(a, b, atol=1e-7), name


def test_one_conv_pass_in_the_actor_update_equals_two():
    """The actor's gradients with shared features equal those of separate, detached passes."""
    agent = dmc_agent(dmc_args()).double()
    obs = torch.rand(6, 9, 21, 21, dtype=torch.float64)
    noise = torch.randn(6, 1, dtype=torch.float64)
    features = agent.critic.encoder.convs(obs).detach()
    action, log_prob = agent.actor.sample(features, noise)
    q1, q2 = agent.critic(agent.critic.encoder(obs), action)
    plain = (agent.log_alpha.exp().detach() * log_prob - torch.minimum(q1, q2)).mean()
    fast, _ = agent.actor_loss(obs, noise)
    parameters = list(agent.actor.parameters())
    plain_gradients = torch.autograd.grad(plain, parameters)
    fast_gradients = torch.autograd.grad(fast, parameters)
    assert all(gradient.abs().sum() > 0 for gradient in plain_gradients)
    for a, b in zip(plain_gradients, fast_gradients):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


def test_gradient_norm_of_the_mooss_step_is_limited():
    args = dmc_args(max_grad_norm=1e-3, aux_weight=10.0)
    agent = dmc_agent(args)
    agent.mooss_step(dmc_replay(args), 0, log=True)
    norms = [parameter.grad.norm() for parameter in agent.aux_parameters]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    assert float(agent.metrics["mooss/grad_norm"]) > 1e-2
    assert norm.item() == pytest.approx(1e-3, rel=0.01)


# ------------------------------------------------------------------------------------------- MOOSS
@pytest.mark.quick
def test_queries_see_masked_pixels_as_zero_and_keys_see_everything():
    """Exactly the masked pixels are zero in what a MOOSS step encodes, and only in the query."""
    args = dmc_args(augmentations=())
    agent = dmc_agent(args)
    replay = dmc_replay(args)
    replay.frames.clamp_(min=1)
    seen = {}
    networks = {"query": agent.critic.encoder, "key": agent.key_encoder}
    for name, network in networks.items():
        network.register_forward_pre_hook(
            lambda module, inputs, name=name: seen.update({name: inputs[0].clone()}))
    agent.mooss_step(replay, 5, log=True)
    masks = agent.masks(5)
    assert torch.equal(seen["query"] == 0, masks.expand_as(seen["query"]))
    assert 0.4 < masks.float().mean() < 0.6
    assert (seen["key"] > 0).all()
    assert torch.equal(seen["key"] * ~masks, seen["query"])


def test_lambda_is_nearly_inert_because_adam_is_scale_free():
    """D14: two agents whose lambda differs tenfold take almost the same MOOSS step."""
    moved = []
    for weight in (0.1, 1.0):
        args = dmc_args(aux_weight=weight, aux_warmup_steps=0, max_grad_norm=1e6)
        agent = dmc_agent(args)
        before = agent.decoder.head[0].weight.clone()
        torch.manual_seed(3)
        agent.mooss_step(dmc_replay(args), 0, log=False)
        moved.append(agent.decoder.head[0].weight - before)
    assert moved[0].abs().max() > 1e-5
    assert torch.allclose(moved[0], moved[1], rtol=0.05, atol=1e-6)


def test_base_computes_nothing_of_mooss():
    args = dmc_args(aux_weight=0.0)
    agent = dmc_agent(args)
    replay = dmc_replay(args)
    sample = replay.sample
    lengths = []

    def spy(count, length=1):
        lengths.append(length)
        return sample(count, length)

    replay.sample = spy
    agent.update(replay, 0, log=True)
    assert lengths == [1]
    for name in ("decoder", "key_encoder", "masks", "bilinear"):
        assert not hasattr(agent, name)
    assert set(agent.optimizers) == {"critic", "actor", "alpha"}
    assert not any("mooss" in key for key in agent.metrics)


def test_an_unknown_type_of_mask_is_refused():
    args = dataclasses.replace(dmc_args(), mask_type="stripes")
    bank = dmc.MaskBank(args, args.aux_batch_size, CPU)
    with pytest.raises(ValueError, match="stripes"):
        bank(0)


# --------------------------------------------------------------------------- copies and schedules
@pytest.mark.quick
def test_key_encoder_is_a_copy_that_follows_its_ema():
    args = dmc_args(target_ema=0.9, target_update_period=2)
    agent = dmc_agent(args)
    replay = dmc_replay(args)
    online = agent.critic.encoder
    for key, parameter in parameter_pairs(agent.key_encoder, online):
        assert torch.equal(key, parameter)
        assert key.data_ptr() != parameter.data_ptr()
    for index in range(4):
        before = copy.deepcopy(agent.key_encoder)
        agent.update(replay, index, log=False)
        m = 0.9 if index % 2 == 0 else 1.0
        for old, new, followed in parameter_pairs(before, agent.key_encoder, online):
            assert torch.allclose(new, m * old + (1 - m) * followed, atol=1e-6)
            assert new.grad is None and not new.requires_grad


@pytest.mark.quick
def test_target_critic_follows_two_emas_every_second_update():
    args = dmc_args(critic_ema=0.8, critic_encoder_ema=0.5)
    agent = dmc_agent(args)
    replay = dmc_replay(args)
    for index in range(3):
        before = copy.deepcopy(agent.critic_target)
        agent.update(replay, index, log=False)
        for part, momentum in (("heads", 0.8), ("encoder", 0.5)):
            m = momentum if index % 2 == 0 else 1.0
            networks = (before, agent.critic_target, agent.critic)
            parts = [getattr(network, part) for network in networks]
            for old, new, followed in parameter_pairs(*parts):
                assert torch.allclose(new, m * old + (1 - m) * followed, atol=1e-6)


def test_ema_zero_is_a_plain_copy():
    a = torch.nn.Linear(3, 3)
    b = torch.nn.Linear(3, 3)
    dmc.ema_update(a, b, 0.0)
    assert torch.equal(a.weight, b.weight) and torch.equal(a.bias, b.bias)


@pytest.mark.parametrize("m", [0.0, 0.9, 1.0])
def test_foreach_ema_equals_a_loop(m):
    a = torch.nn.Linear(5, 5).double()
    b = torch.nn.Linear(5, 5).double()
    plain = [m * x + (1 - m) * y for x, y in parameter_pairs(a, b)]
    dmc.ema_update(a, b, m)
    assert all(torch.allclose(x, y, atol=1e-15) for x, y in zip(a.parameters(), plain))


def test_actor_updates_every_second_update():
    """D12."""
    args = dmc_args()
    agent = dmc_agent(args)
    replay = dmc_replay(args)
    for index in range(4):
        before = agent.actor.head[0].weight.clone()
        agent.update(replay, index, log=False)
        assert torch.equal(before, agent.actor.head[0].weight) == (index % 2 == 1)


def test_auxiliary_learning_rate_warms_up_then_decays():
    """D7, and its two switches."""
    rate = dmc_agent(dmc_args(aux_lr=0.5)).aux_learning_rate
    assert rate(0) == pytest.approx(0.5 * 0.0005)
    assert rate(6000) == pytest.approx(0.5)
    assert rate(3000) == pytest.approx(0.5 * (0.0005 + 0.9995 / 2))
    assert rate(24_000) == pytest.approx(0.5 * math.sqrt(6000 / 24_000))
    rate = dmc_agent(dmc_args(aux_lr=0.5, aux_lr_decay=False)).aux_learning_rate
    assert rate(24_000) == 0.5
    assert rate(0) == pytest.approx(0.5 * 0.0005)
    rate = dmc_agent(dmc_args(aux_lr=0.5, aux_warmup_steps=0)).aux_learning_rate
    assert rate(0) == rate(10_000) == 0.5


def test_the_mooss_step_takes_the_scheduled_learning_rate():
    args = dmc_args(aux_lr=0.5)
    agent = dmc_agent(args)
    replay = dmc_replay(args)
    for index in (0, 6000, 24_000):
        agent.mooss_step(replay, index, log=False)
        used = agent.optimizers["aux"].param_groups[0]["lr"]
        assert used == agent.metrics["mooss/lr"] == agent.aux_learning_rate(index)


# ---------------------------------------------------------------------------------------- networks
def test_initialisation_is_delta_orthogonal():
    agent = dmc_agent(dmc_args(num_filters=16))
    convs = [x for x in agent.critic.encoder.convs if isinstance(x, torch.nn.Conv2d)]
    assert len(convs) == 4
    for conv in convs:
        outside = conv.weight.clone()
        outside[:, :, 1, 1] = 0
        assert (outside == 0).all() and (conv.bias == 0).all()
    centre = convs[1].weight[:, :, 1, 1]
    assert torch.allclose(centre @ centre.T, 2 * torch.eye(16), atol=1e-5)
    weight = agent.critic.heads[0][2].weight
    assert torch.allclose(weight @ weight.T, torch.eye(16), atol=1e-5)
    assert (agent.bilinear >= 0).all() and (agent.bilinear < 1).all()
    assert agent.bilinear.std() > 0.2


def test_paper_sizes():
    """84x84 observations give 35x35 features; embeddings of 64; the actor projects on its own."""
    args = dmc.resolve_args(dmc.Args(env_id="walker-walk"))
    agent = dmc.Agent(args, (3, 3, 100, 100), 6, CPU)
    encoder = agent.critic.encoder
    strides = [conv.stride for conv in encoder.convs if isinstance(conv, torch.nn.Conv2d)]
    assert encoder.feature_count == 64 * 35 * 35
    assert encoder.projection[0].out_features == agent.actor.projection[0].out_features == 64
    assert strides == [(2, 2), (1, 1), (1, 1), (1, 1)]
    assert agent.critic.heads[0][0].in_features == 70
    assert agent.actor.head[2].out_features == 1024


def test_channels_last_and_in_place_relu_equal_the_plain_network():
    """In float64: value and gradient as of contiguous memory and ReLUs that are not in place."""
    torch.manual_seed(0)
    fast = dmc.Encoder(9, 21, 8, 6).double().to(memory_format=torch.channels_last)
    plain = copy.deepcopy(fast).to(memory_format=torch.contiguous_format)
    for number, layer in enumerate(plain.convs):
        if isinstance(layer, torch.nn.ReLU):
            plain.convs[number] = torch.nn.ReLU()
    obs = torch.rand(4, 9, 21, 21, dtype=torch.float64)
    states = [fast(obs.contiguous(memory_format=torch.channels_last)), plain(obs)]
    assert torch.allclose(*states, atol=1e-12)
    for state in states:
        (state * torch.arange(24.0).view(4, 6)).sum().backward()
    for a, b in parameter_pairs(fast, plain):
        assert a.grad.abs().sum() > 0
        assert torch.allclose(a.grad, b.grad, atol=1e-10)


def test_encoder_metrics_show_a_collapse():
    """Equal observations have no spread; an encoder with very negative last biases is dead."""
    agent = dmc_agent(dmc_args())
    obs = torch.rand(6, 9, 21, 21)
    with torch.no_grad():
        states = agent.critic.encoder(obs)
    metrics = agent.encoder_metrics(obs)
    spread = states.std(0).mean().item()
    assert float(metrics["encoder/state_std"]) == pytest.approx(spread, rel=1e-5)
    assert 0 <= float(metrics["encoder/dead_features"]) < 0.5
    equal_obs = obs[:1].expand(6, -1, -1, -1)
    assert float(agent.encoder_metrics(equal_obs)["encoder/state_std"]) < 1e-6
    agent.critic.encoder.convs[-3].bias.data.fill_(-1e6)
    assert float(agent.encoder_metrics(obs)["encoder/dead_features"]) == 1.0


# ---------------------------------------------------------------------------------------- variants
@pytest.mark.quick
@pytest.mark.parametrize("changes", [
    dict(decoder_inputs="none"), dict(decoder_inputs="s"), dict(decoder_inputs="sar"),
    dict(mask_type="cube"), dict(mask_ratio=0.0), dict(mask_ratio=1.0),
    dict(temporal_window=0), dict(temporal_window=7), dict(decoder_depth=3),
    dict(level_reduction="sum"), dict(normalize_embeddings=False), dict(walk_connectivity=6),
    dict(walk_root="fixed"), dict(share_mask=True), dict(rl_intensity=True),
    dict(crop_per_sequence=True), dict(pixel_scale=1.0), dict(augmentations=()),
    dict(optimizer="adamw"), dict(amp="bf16"), dict(aux_batch_size=1), dict(preset="authors"),
], ids=str)
def test_every_variant_updates_with_finite_losses(changes):
    args = dmc_args(**changes)
    agent = dmc_agent(args)
    replay = dmc_replay(args)
    before = copy.deepcopy(agent.state_dict())
    for index in range(2):
        agent.update(replay, index, log=True)
    losses = {
        key: float(value) for key, value in agent.metrics.items() if key.startswith("losses/")}
    assert set(losses) == {"losses/critic", "losses/actor", "losses/alpha", "losses/mooss"}
    assert all(math.isfinite(value) for value in losses.values()), losses
    after = agent.state_dict()
    same = [name for name in before if torch.equal(before[name], after[name])]
    assert not same, f"not trained: {same}"


def test_bf16_keeps_logits_and_log_probabilities_in_fp32():
    args = dmc_args(amp="bf16")
    agent = dmc_agent(args)
    mooss_loss, mooss_outputs = agent.mooss_loss(*a_mooss_batch(args, agent))
    obs, *_, noise = a_batch(args)
    with agent.autocast():
        features = agent.critic.encoder.convs(obs)
        action, log_prob = agent.actor.sample(features, noise)
    assert features.dtype == torch.bfloat16
    critic_loss, critic_outputs = agent.critic_loss(*a_batch(args))
    exact = [
        action, log_prob, mooss_loss, mooss_outputs["similarity"], critic_loss,
        critic_outputs["sac/q1"], critic_outputs["sac/target_q"]]
    assert {value.dtype for value in exact} == {torch.float32}
    in_fp32, _ = dmc_agent(dmc_args()).critic_loss(*a_batch(args))
    assert in_fp32.item() == pytest.approx(critic_loss.item(), rel=0.05)


# ------------------------------------------------------------------------------------------ acting
def random_obs(*shape):
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def test_act_takes_one_and_many_observations():
    agent = dmc_agent(dmc_args(), action_dim=2)
    many = random_obs(5, 3, 3, 24, 24)
    actions = agent.act(many, deterministic=True)
    assert actions.shape == (5, 2) and actions.dtype == np.float32
    assert (np.abs(actions) < 1).all() and actions.std(0).min() > 0
    for obs, action in zip(many, actions):
        assert agent.act(obs, deterministic=True).shape == (2,)
        assert np.allclose(agent.act(obs, deterministic=True), action, atol=1e-5)
    assert agent.act(many[:1]).shape == (1, 2)


def test_act_explores_around_the_deterministic_action():
    agent = dmc_agent(dmc_args(), action_dim=2)
    obs = random_obs(3, 3, 24, 24)
    pixels = torch.from_numpy(obs[..., 1:22, 1:22].reshape(1, 9, 21, 21)) / 255
    with torch.no_grad():
        mean, log_std = agent.actor(agent.critic.encoder.convs(pixels))
    assert np.allclose(agent.act(obs, deterministic=True), torch.tanh(mean[0]), atol=1e-5)
    torch.manual_seed(0)
    same = np.broadcast_to(obs, (4000, *obs.shape)).copy()
    before_tanh = torch.atanh(torch.from_numpy(agent.act(same)).double().clamp(-0.999999, 0.999999))
    expected = log_std[0].exp().double()
    assert torch.allclose(before_tanh.std(0), expected, rtol=0.1)
    assert ((before_tanh.mean(0) - mean[0]).abs() < 5 * expected / 4000 ** 0.5).all()


def test_act_looks_at_the_centre_alone():
    agent = dmc_agent(dmc_args())
    # At the start a conv passes on every second pixel alone; now all of them matter.
    for parameter in agent.critic.encoder.convs.parameters():
        torch.nn.init.uniform_(parameter, 0.0, 0.2)
    obs = random_obs(3, 3, 24, 24)
    other_border = 255 - obs
    other_border[..., 1:22, 1:22] = obs[..., 1:22, 1:22]
    action = agent.act(obs, deterministic=True)
    assert np.array_equal(agent.act(other_border, deterministic=True), action)
    for corner in (1, 18):
        other_corner = obs.copy()
        other_corner[..., corner:corner + 4, corner:corner + 4] //= 2
        assert not np.array_equal(agent.act(other_corner, deterministic=True), action)


@pytest.mark.parametrize("obs", [
    random_obs(3, 3, 21, 21), random_obs(3, 3, 25, 25), random_obs(5, 3, 3, 30, 30),
    random_obs(4, 3, 24, 24), random_obs(9, 24, 24), random_obs(2, 5, 3, 3, 24, 24),
    random_obs(3, 24, 24, 3), random_obs(3, 3, 24, 24).astype(np.float32) / 255,
], ids=lambda obs: f"{obs.shape} {obs.dtype}")
def test_act_refuses_what_is_not_a_rendered_observation_and_names_the_shape(obs):
    agent = dmc_agent(dmc_args())
    with pytest.raises(ValueError, match=r"\(3, 3, 24, 24\)"):
        agent.act(obs)


# -------------------------------------------------------------------------------------------- loop
def test_a_step_is_act_update_environment_store(dot_env, tmp_path, monkeypatch):
    """On CUDA the update computes while the simulator runs; random steps come before."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dmc, "evaluate", lambda *args, **kwargs: [(0.0, 1)])
    # It acts to see how long that takes.
    monkeypatch.setattr(common, "print_plan", lambda *args: None)
    events = []

    def record(owner, name):
        function = getattr(owner, name)

        def call(*args, **kwargs):
            events.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    record(dmc.Agent, "act")
    record(dmc.Agent, "update")
    record(tiny.DotEnv, "step")
    record(dmc.SequenceReplay, "add")
    flags = {**tiny.DMC_FLAGS, "run_root": str(tmp_path), "total_timesteps": 60}
    assert dmc.main(dmc.Args(**flags)) == 0
    random_step = ["step", "add"]
    learning_step = ["act", "update", "step", "add"]
    assert events == 20 * random_step + 10 * learning_step
