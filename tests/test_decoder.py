"""The predictive decoder: causal, sized as in the paper, and sensitive to what each variant may see."""

import math

import pytest
import torch

from sac_mooss_dmc import PredictiveDecoder


def inputs(batch=2, length=16, dim=64, action_dim=2):
    torch.manual_seed(0)
    return torch.randn(batch, length, dim), torch.randn(batch, length, action_dim), torch.randn(batch, length, 1)


@pytest.mark.parametrize("depth,parameters", [(1, 63_268), (2, 113_252), (3, 163_236), (4, 213_220)])
def test_parameter_counts_equal_the_papers_depth_table(depth, parameters):
    decoder = PredictiveDecoder(64, 2, depth=depth)
    assert sum(p.numel() for p in decoder.parameters()) == parameters


@pytest.mark.parametrize("kind", ["s", "sa", "sar"])
@pytest.mark.parametrize("changed", ["state", "action", "reward"])
def test_a_later_token_changes_no_earlier_output(kind, changed):
    torch.manual_seed(0)
    decoder, at = PredictiveDecoder(64, 2, inputs=kind), 7
    states, actions, rewards = inputs()
    before = decoder(states, actions, rewards)
    {"state": states, "action": actions, "reward": rewards}[changed][:, at] += 1.0
    difference = (decoder(states, actions, rewards) - before).abs().amax((0, 2))
    first = at if changed == "state" else at + 1  # query i sees states up to i, actions and rewards before i
    seen = changed == "state" or changed[0] in kind
    assert (difference[:first] == 0).all()
    assert (difference[first:] > 0).all() == seen


def test_no_transformer_treats_each_state_alone():
    decoder = PredictiveDecoder(64, 2, inputs="none")
    states, actions, _ = inputs()
    before = decoder(states, actions)
    states[:, 3] += 1.0
    difference = (decoder(states, actions + 1) - before).abs().amax((0, 2))
    assert (difference[3] > 0) and (difference[:3] == 0).all() and (difference[4:] == 0).all()
    assert sum(p.numel() for p in decoder.parameters()) == 12_964


def test_first_block_equals_a_hand_computation():
    """Pre-norm attention and MLP with biases, interleaved tokens, shared sinusoidal positions: from the formulas."""
    torch.manual_seed(0)
    decoder = PredictiveDecoder(8, 2, depth=1, heads=2, head_dim=5).double()
    states, actions, _ = (x.double() for x in inputs(batch=1, length=3, dim=8))
    action_tokens = decoder.embed_action(actions)
    x = torch.zeros(6, 8, dtype=torch.float64)
    for i in range(3):
        position = torch.tensor([f(i / 10000 ** (2 * (j // 2) / 8)) for j, f in enumerate([math.sin, math.cos] * 4)],
                                dtype=torch.float64)
        x[2 * i], x[2 * i + 1] = states[0, i] + position, action_tokens[0, i] + position

    def norm(v, layer):
        return (v - v.mean()) / torch.sqrt(v.var(unbiased=False) + 1e-6) * layer.weight + layer.bias

    block, out = decoder.blocks[0], x.clone()
    weight, bias = block.self_attn.in_proj_weight, block.self_attn.in_proj_bias
    q, k, v = (torch.stack([norm(row, block.norm1) for row in x]) @ weight.T + bias).chunk(3, dim=1)
    for t in range(6):
        heads = []
        for h in (slice(0, 4), slice(4, 8)):
            scores = torch.softmax(torch.stack([q[t, h] @ k[u, h] / 2 for u in range(t + 1)]), 0)
            heads.append(sum(score * v[u, h] for u, score in enumerate(scores)))
        out[t] = x[t] + block.self_attn.out_proj(torch.cat(heads))
    gelu = torch.nn.functional.gelu
    out = torch.stack([row + block.linear2(gelu(block.linear1(norm(row, block.norm2)))) for row in out])
    queries = torch.stack([decoder.head(norm(out[2 * i], decoder.norm)) for i in range(3)])
    assert torch.allclose(decoder(states, actions)[0], queries, atol=1e-6)


def test_initialisation_is_xavier_in_blocks_and_default_in_the_head():
    torch.manual_seed(0)
    decoder = PredictiveDecoder(64, 2)
    block = decoder.blocks[0]
    for weight in (block.self_attn.in_proj_weight, block.self_attn.out_proj.weight, block.linear1.weight,
                   decoder.embed_action.weight):
        bound = (6 / sum(weight.shape)) ** 0.5
        assert 0.9 * bound < weight.abs().max() <= bound
    for bias in (block.self_attn.in_proj_bias, block.self_attn.out_proj.bias, block.linear1.bias, block.linear2.bias,
                 decoder.embed_action.bias):
        assert (bias == 0).all()
    assert decoder.head[0].weight.abs().max() <= 1 / 8 and (decoder.head[0].bias != 0).any()
    assert decoder.norm.eps == block.norm1.eps == 1e-6
