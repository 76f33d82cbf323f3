"""SAC and MOOSS inside the agent: targets by hand, who gets gradients from what, schedules and copies."""

import copy
import math

import pytest
import torch

from conftest import filled_replay, tiny_agent, tiny_args
from sac_mooss_dmc import ema_update

CPU = torch.device("cpu")


def a_batch(args, action_dim=1):
    torch.manual_seed(1)
    shape = (args.batch_size, 9, args.image_size, args.image_size)
    terminated = torch.arange(args.batch_size) % 2 == 0
    return (torch.rand(shape), torch.rand(args.batch_size, action_dim), torch.rand(args.batch_size), terminated,
            torch.rand(shape), torch.randn(args.batch_size, action_dim))


def a_mooss_batch(args, agent, action_dim=1):
    """Masked observations, keys of unmasked ones, actions, rewards."""
    torch.manual_seed(2)
    steps = args.aux_batch_size * args.seq_len
    shape = (steps, 9, args.image_size, args.image_size)
    batch = (args.aux_batch_size, args.seq_len)
    keys, = agent.key_states(torch.rand(shape))
    return torch.rand(shape) * ~agent.masks(0), keys, torch.rand(*batch, action_dim), torch.rand(*batch, 1)


def test_log_probability_equals_a_numerical_change_of_variables():
    agent = tiny_agent(tiny_args(), action_dim=2)
    features, noise = torch.rand(5, agent.critic.encoder.features), torch.randn(5, 2)
    action, log_prob = agent.actor.sample(features, noise)
    mean, log_std = agent.actor(features)
    normal = torch.distributions.Normal(mean, log_std.exp())
    squashed = torch.distributions.TransformedDistribution(normal, torch.distributions.TanhTransform())
    assert (log_std > -10).all() and (log_std < 2).all()
    assert torch.allclose(log_prob[:, 0], squashed.log_prob(action).sum(1), atol=1e-3)


def test_critic_loss_equals_a_hand_computation():
    """r + gamma * (min Q' - alpha log pi), cut at terminations only, from target nets and online actor."""
    args = tiny_args(gamma=0.9, init_temperature=0.3)
    agent = tiny_agent(args)
    for parameter in agent.critic_target.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    obs, action, reward, terminated, next_obs, noise = a_batch(args)
    loss, *_ = agent.critic_loss(obs, action, reward, terminated, next_obs, noise)
    expected = 0.0
    for i in range(args.batch_size):
        features = agent.critic.encoder.convs(next_obs[i:i + 1])
        mean, log_std = agent.actor(features)
        pre = mean + log_std.exp() * noise[i]
        next_action = torch.tanh(pre)
        log_pi = (torch.distributions.Normal(mean, log_std.exp()).log_prob(pre)
                  - torch.log(1 - next_action ** 2 + 1e-6)).sum()
        state = agent.critic_target.encoder(next_obs[i:i + 1])
        q = min(head(torch.cat([state, next_action], 1)).item() for head in agent.critic_target.heads)
        target = reward[i].item() + (0.0 if terminated[i] else 0.9 * (q - 0.3 * log_pi.item()))
        state = agent.critic.encoder(obs[i:i + 1])
        for head in agent.critic.heads:
            expected += (head(torch.cat([state, action[i:i + 1]], 1)).item() - target) ** 2 / args.batch_size
    assert loss.item() == pytest.approx(expected, rel=1e-4)


def test_actor_and_temperature_losses_equal_a_hand_computation():
    args = tiny_args(init_temperature=0.3)
    agent = tiny_agent(args, action_dim=2)
    obs, *_, noise = a_batch(args, action_dim=2)
    actor_loss, alpha_loss, entropy = agent.actor_loss(obs, noise)
    action, log_prob = agent.actor.sample(agent.critic.encoder.convs(obs), noise)
    q1, q2 = agent.critic(agent.critic.encoder(obs), action)
    assert actor_loss.item() == pytest.approx((0.3 * log_prob - torch.minimum(q1, q2)).mean().item(), rel=1e-4)
    assert alpha_loss.item() == pytest.approx((0.3 * (-log_prob - (-2)).mean()).item(), rel=1e-4)
    assert entropy.item() == pytest.approx(-log_prob.mean().item(), rel=1e-4)


def touched(module):
    return {name for name, p in module.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}


def test_mooss_loss_reaches_the_critics_encoder_and_not_the_actor():
    args = tiny_args()
    agent = tiny_agent(args)
    loss, similarity = agent.mooss_loss(*a_mooss_batch(args, agent))
    loss.backward()
    assert similarity.shape == (24, 24)
    assert touched(agent.critic.encoder) == {name for name, _ in agent.critic.encoder.named_parameters()}
    assert touched(agent.decoder) >= {"blocks.0.linear1.weight", "embed_action.weight", "head.2.weight"}
    assert agent.bilinear.grad.abs().sum() > 0
    for module in (agent.actor, agent.critic.heads, agent.key_encoder, agent.critic_target):
        assert not touched(module)


def test_actor_step_moves_neither_convs_nor_critic():
    args = tiny_args(aux_weight=0.0, rl_lr=0.01)
    agent, replay = tiny_agent(args), filled_replay(args)
    agent.optimizers["critic"].param_groups[0]["lr"] = 0.0
    before = copy.deepcopy(agent.state_dict())
    agent.update(replay, 0, log=True)
    after = agent.state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if name.startswith("actor.")} | {"log_alpha"}


def test_queries_see_masked_pixels_as_zero_and_keys_see_everything():
    """What a MOOSS step hands to the two encoders: exactly the masked pixels are zero, and only for the query."""
    args = tiny_args(augmentations=())
    agent, replay = tiny_agent(args), filled_replay(args)
    replay.frames.clamp_(min=1)
    seen = {}
    for name, network in (("query", agent.critic.encoder), ("key", agent.key_encoder)):
        network.register_forward_pre_hook(lambda module, inputs, name=name: seen.update({name: inputs[0].clone()}))
    agent.mooss_step(replay, 5, log=True)
    masks = agent.masks(5)
    assert torch.equal(seen["query"] == 0, masks.expand_as(seen["query"])) and 0.4 < masks.float().mean() < 0.6
    assert (seen["key"] > 0).all() and torch.equal(seen["key"] * ~masks, seen["query"])


def test_key_encoder_is_a_copy_that_follows_its_ema():
    args = tiny_args(target_ema=0.9, target_update_period=2)
    agent, replay = tiny_agent(args), filled_replay(args)
    assert all(torch.equal(a, b) for a, b in zip(agent.key_encoder.parameters(), agent.critic.encoder.parameters()))
    for update in range(4):
        before = [p.clone() for p in agent.key_encoder.parameters()]
        agent.update(replay, update, log=False)
        m = 0.9 if update % 2 == 0 else 1.0
        for old, new, online in zip(before, agent.key_encoder.parameters(), agent.critic.encoder.parameters()):
            assert torch.allclose(new, m * old + (1 - m) * online, atol=1e-6)
            assert new.grad is None and not new.requires_grad


def test_target_critic_follows_two_emas_every_second_update():
    args = tiny_args(critic_ema=0.8, critic_encoder_ema=0.5)
    agent, replay = tiny_agent(args), filled_replay(args)
    for update in range(3):
        before = copy.deepcopy(agent.critic_target)
        agent.update(replay, update, log=False)
        for part, m in (("heads", 0.8), ("encoder", 0.5)):
            m = m if update % 2 == 0 else 1.0
            for old, new, online in zip(*(getattr(net, part).parameters() for net in
                                          (before, agent.critic_target, agent.critic))):
                assert torch.allclose(new, m * old + (1 - m) * online, atol=1e-6)


def test_ema_zero_is_a_plain_copy():
    a, b = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    ema_update(a, b, 0.0)
    assert torch.equal(a.weight, b.weight) and torch.equal(a.bias, b.bias)


def test_actor_updates_every_second_update():
    args = tiny_args()
    agent, replay = tiny_agent(args), filled_replay(args)
    for update in range(4):
        before = agent.actor.head[0].weight.clone()
        agent.update(replay, update, log=False)
        assert torch.equal(before, agent.actor.head[0].weight) == (update % 2 == 1)


def test_auxiliary_learning_rate_warms_up_then_decays():
    """D7, and its two switches."""
    rate = tiny_agent(tiny_args(aux_lr=0.5)).aux_learning_rate
    assert rate(0) == pytest.approx(0.5 * 0.0005) and rate(6000) == pytest.approx(0.5)
    assert rate(3000) == pytest.approx(0.5 * (0.0005 + 0.9995 / 2))
    assert rate(24_000) == pytest.approx(0.5 * math.sqrt(6000 / 24_000))
    rate = tiny_agent(tiny_args(aux_lr=0.5, aux_lr_decay=False)).aux_learning_rate
    assert rate(24_000) == 0.5 and rate(0) == pytest.approx(0.5 * 0.0005)
    rate = tiny_agent(tiny_args(aux_lr=0.5, aux_warmup_steps=0)).aux_learning_rate
    assert rate(0) == rate(10_000) == 0.5


def test_base_computes_nothing_of_mooss():
    args = tiny_args(aux_weight=0.0)
    agent, replay = tiny_agent(args), filled_replay(args)
    lengths, sample = [], replay.sample_rows
    replay.sample_rows = lambda count, length=1: lengths.append(length) or sample(count, length)
    agent.update(replay, 0, log=True)
    assert lengths == [1]
    assert not any(hasattr(agent, name) for name in ("decoder", "key_encoder", "masks", "bilinear"))
    assert set(agent.optimizers) == {"critic", "actor", "alpha"}
    assert not any("mooss" in key for key in agent.metrics)


def test_lambda_is_nearly_inert_because_adam_is_scale_free():
    """D14: two agents whose lambda differs tenfold take almost the same MOOSS step."""
    moved = []
    for weight in (0.1, 1.0):
        args = tiny_args(aux_weight=weight, aux_warmup_steps=0, max_grad_norm=1e6)
        agent = tiny_agent(args)
        before = agent.decoder.head[0].weight.clone()
        torch.manual_seed(3)
        agent.mooss_step(filled_replay(args), 0, log=False)
        moved.append(agent.decoder.head[0].weight - before)
    assert torch.allclose(moved[0], moved[1], rtol=0.05, atol=1e-6)


def test_gradient_norm_of_the_mooss_step_is_limited():
    args = tiny_args(max_grad_norm=1e-3, aux_weight=10.0)
    agent = tiny_agent(args)
    agent.mooss_step(filled_replay(args), 0, log=True)
    norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in agent.aux_parameters]))
    assert float(agent.metrics["mooss/grad_norm"]) > 1e-2 and norm.item() == pytest.approx(1e-3, rel=0.01)


def test_initialisation_is_delta_orthogonal():
    agent = tiny_agent(tiny_args(num_filters=16))
    for conv in agent.critic.encoder.convs[::2][:4]:
        outside = conv.weight.clone()
        outside[:, :, 1, 1] = 0
        assert (outside == 0).all() and (conv.bias == 0).all()
    centre = agent.critic.encoder.convs[2].weight[:, :, 1, 1]
    assert torch.allclose(centre @ centre.T, 2 * torch.eye(16), atol=1e-5)
    weight = agent.critic.heads[0][2].weight
    assert torch.allclose(weight @ weight.T, torch.eye(16), atol=1e-5)
    assert (agent.bilinear >= 0).all() and (agent.bilinear < 1).all() and agent.bilinear.std() > 0.2


def test_paper_sizes():
    """84x84 observations give 35x35 features; embeddings of 64; actor projection apart from the critic's."""
    from sac_mooss_dmc import Args, resolve_args, Agent
    agent = Agent(resolve_args(Args(env_id="walker-walk")), (3, 3, 100, 100), 6, torch.device("cpu"))
    assert agent.critic.encoder.features == 64 * 35 * 35
    assert agent.critic.encoder.projection[0].out_features == agent.actor.projection[0].out_features == 64
    assert [conv.stride for conv in agent.critic.encoder.convs if isinstance(conv, torch.nn.Conv2d)] == \
        [(2, 2), (1, 1), (1, 1), (1, 1)]
    assert agent.critic.heads[0][0].in_features == 70 and agent.actor.head[2].out_features == 1024


@pytest.mark.parametrize("changes", [
    dict(decoder_inputs="none"), dict(decoder_inputs="s"), dict(decoder_inputs="sar"), dict(mask_type="cube"),
    dict(mask_ratio=0.0), dict(mask_ratio=1.0), dict(temporal_window=0), dict(temporal_window=7),
    dict(decoder_depth=3), dict(level_reduction="sum"), dict(normalize_embeddings=False), dict(walk_connectivity=6),
    dict(walk_root="fixed"), dict(share_mask=True), dict(rl_intensity=True), dict(crop_per_sequence=True),
    dict(pixel_scale=1.0),
    dict(augmentations=()), dict(optimizer="adamw"), dict(amp="bf16"), dict(aux_batch_size=1), dict(preset="authors")])
def test_every_variant_updates_with_finite_losses(changes):
    args = tiny_args(**changes)
    agent, replay = tiny_agent(args), filled_replay(args)
    before = copy.deepcopy(agent.state_dict())
    for update in range(2):
        agent.update(replay, update, log=True)
    losses = {key: float(value) for key, value in agent.metrics.items() if key.startswith("losses/")}
    assert set(losses) == {"losses/critic", "losses/actor", "losses/alpha", "losses/mooss"}
    assert all(math.isfinite(value) for value in losses.values()), losses
    same = [name for name, value in agent.state_dict().items() if torch.equal(value, before[name])]
    assert not same, f"not trained: {same}"


def test_encoder_metrics_show_a_collapse():
    """Equal observations have no spread; an encoder whose last biases are very negative is dead."""
    agent = tiny_agent(tiny_args())
    obs = torch.rand(6, 9, 21, 21)
    with torch.no_grad():
        states = agent.critic.encoder(obs)
    metrics = agent.encoder_metrics(obs)
    assert float(metrics["encoder/state_std"]) == pytest.approx(states.std(0).mean().item(), rel=1e-5)
    assert 0 <= float(metrics["encoder/dead_features"]) < 0.5
    assert float(agent.encoder_metrics(obs[:1].expand(6, -1, -1, -1))["encoder/state_std"]) < 1e-6
    agent.critic.encoder.convs[-3].bias.data.fill_(-1e6)
    assert float(agent.encoder_metrics(obs)["encoder/dead_features"]) == 1.0


def test_bf16_keeps_logits_and_log_probabilities_in_fp32():
    args = tiny_args(amp="bf16")
    agent = tiny_agent(args)
    loss, similarity = agent.mooss_loss(*a_mooss_batch(args, agent))
    obs, *_, noise = a_batch(args)
    with agent.autocast():
        assert agent.critic.encoder.convs(obs).dtype == torch.bfloat16
        action, log_prob = agent.actor.sample(agent.critic.encoder.convs(obs), noise)
        assert action.dtype == log_prob.dtype == torch.float32
    critic_loss, q1, _, target = agent.critic_loss(*a_batch(args))
    assert {x.dtype for x in (loss, similarity, critic_loss, q1, target)} == {torch.float32}
    exact = tiny_agent(tiny_args())
    assert exact.critic_loss(*a_batch(args))[0].item() == pytest.approx(critic_loss.item(), rel=0.05)


def test_compiled_losses_equal_eager_ones_in_value_and_gradient():
    args = tiny_args()
    eager, compiled = tiny_agent(args), tiny_agent(tiny_args(compile=True))
    compiled.load_state_dict(eager.state_dict())
    obs, *_, noise = a_batch(args)
    for name, batch in (("critic_loss", a_batch(args)), ("mooss_loss", a_mooss_batch(args, eager)),
                        ("actor_loss", (obs, noise))):
        results = []
        for agent in (eager, compiled):
            agent.zero_grad()
            outputs = getattr(agent, name)(*batch)
            (outputs[0] + (outputs[1] if name == "actor_loss" else 0)).backward()
            results.append((outputs[0].item(), [p.grad for p in agent.parameters()]))
        assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
        assert sum(grad is not None for grad in results[0][1]) > 5
        for a, b in zip(results[0][1], results[1][1]):
            a, b = (torch.zeros(1) if grad is None else grad for grad in (a, b))
            assert torch.allclose(a, b, rtol=1e-3, atol=1e-5)
