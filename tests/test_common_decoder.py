"""The predictive decoder: causal, sized as in the paper, and sensitive to what each variant sees.

Both scripts carry the same text, so one of them is tested.
"""

import math

import pytest
import torch

from sac_mooss_dmc import PredictiveDecoder


def inputs(batch=2, length=16, dim=64, action_dim=2):
    """Random states, actions and rewards."""
    torch.manual_seed(0)
    return [torch.randn(batch, length, size) for size in (dim, action_dim, 1)]


def parameters(decoder):
    return sum(parameter.numel() for parameter in decoder.parameters())


@pytest.mark.parametrize("depth,count", [(1, 63_268), (2, 113_252), (3, 163_236), (4, 213_220)])
def test_parameter_counts_equal_the_papers_depth_table(depth, count):
    assert parameters(PredictiveDecoder(64, 2, depth=depth)) == count


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["s", "sa", "sar"])
@pytest.mark.parametrize("changed", ["state", "action", "reward"])
def test_a_later_token_changes_no_earlier_output(kind, changed):
    """Query i sees the states up to i, and the actions and rewards before i."""
    torch.manual_seed(0)
    decoder = PredictiveDecoder(64, 2, inputs=kind)
    at = 7
    states, actions, rewards = inputs()
    before = decoder(states, actions, rewards)
    {"state": states, "action": actions, "reward": rewards}[changed][:, at] += 1.0
    difference = (decoder(states, actions, rewards) - before).abs().amax((0, 2))
    first = at if changed == "state" else at + 1
    seen = changed == "state" or changed[0] in kind
    assert (difference[:first] == 0).all()
    assert (difference[first:] > 0).all() == seen


def test_no_transformer_treats_each_state_alone():
    decoder = PredictiveDecoder(64, 2, inputs="none")
    states, actions, _ = inputs()
    before = decoder(states, actions)
    states[:, 3] += 1.0
    difference = (decoder(states, actions + 1) - before).abs().amax((0, 2))
    assert difference[3] > 0
    assert (difference[:3] == 0).all()
    assert (difference[4:] == 0).all()
    assert parameters(decoder) == 12_964


def sinusoidal(step, dim):
    """The position of a step, entry by entry."""
    entries = []
    for channel in range(dim):
        angle = step / 10000 ** (2 * (channel // 2) / dim)
        entries.append(math.sin(angle) if channel % 2 == 0 else math.cos(angle))
    return torch.tensor(entries, dtype=torch.float64)


def layer_norm(row, layer):
    deviation = torch.sqrt(row.var(unbiased=False) + 1e-6)
    return (row - row.mean()) / deviation * layer.weight + layer.bias


def causal_attention(rows, attention, heads):
    """Multi-head attention, query by query and head by head."""
    q, k, v = (rows @ attention.in_proj_weight.T + attention.in_proj_bias).chunk(3, dim=1)
    size = rows.shape[1] // heads
    outputs = []
    for t in range(len(rows)):
        found = []
        for h in range(heads):
            part = slice(h * size, (h + 1) * size)
            logits = torch.stack([q[t, part] @ k[u, part] for u in range(t + 1)]) / math.sqrt(size)
            shares = torch.softmax(logits, 0)
            found.append(sum(share * v[u, part] for u, share in enumerate(shares)))
        outputs.append(attention.out_proj(torch.cat(found)))
    return torch.stack(outputs)


@pytest.mark.quick
def test_first_block_equals_a_hand_computation():
    """Pre-norm attention and MLP with biases, interleaved tokens, shared sinusoidal positions."""
    torch.manual_seed(0)
    decoder = PredictiveDecoder(8, 2, depth=1, heads=2, head_dim=5).double()
    states, actions, _ = [x.double() for x in inputs(batch=1, length=3, dim=8)]
    action_tokens = decoder.embed_action(actions)
    tokens = []
    for i in range(3):
        tokens.append(states[0, i] + sinusoidal(i, 8))
        tokens.append(action_tokens[0, i] + sinusoidal(i, 8))
    x = torch.stack(tokens)

    block = decoder.blocks[0]
    normed = torch.stack([layer_norm(row, block.norm1) for row in x])
    x = x + causal_attention(normed, block.self_attn, heads=2)
    normed = torch.stack([layer_norm(row, block.norm2) for row in x])
    x = x + block.linear2(torch.nn.functional.gelu(block.linear1(normed)))
    queries = torch.stack([decoder.head(layer_norm(x[2 * i], decoder.norm)) for i in range(3)])
    assert torch.allclose(decoder(states, actions)[0], queries, atol=1e-6)


def test_initialisation_is_xavier_in_blocks_and_default_in_the_head():
    torch.manual_seed(0)
    decoder = PredictiveDecoder(64, 2)
    block = decoder.blocks[0]
    attention = block.self_attn
    layers = (attention.out_proj, block.linear1, block.linear2, decoder.embed_action)
    for weight in (attention.in_proj_weight, *(layer.weight for layer in layers)):
        bound = (6 / sum(weight.shape)) ** 0.5
        assert 0.9 * bound < weight.abs().max() <= bound
    for bias in (attention.in_proj_bias, *(layer.bias for layer in layers)):
        assert (bias == 0).all()
    assert decoder.head[0].weight.abs().max() <= 1 / 8
    assert (decoder.head[0].bias != 0).any()
    assert decoder.norm.eps == block.norm1.eps == block.norm2.eps == 1e-6
