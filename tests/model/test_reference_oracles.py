"""The reference against independent implementations in transformers (kimi_linear, glm5_next), where they coincide.

Differences that the tests bridge: kimi_linear has no output gate (ours is made 1/2 by a zero weight), glm5_next has a
low-rank output gate (ours is set to its product) and pools index keys (switched off by pools of one token), and both
upcast to FP32 inside, so comparisons are in FP32 within a float tolerance.
"""

import dataclasses
import importlib

import torch

from zmrl.model.config import PRESETS
from zmrl.model.reference import ForwardContext, mla
from zmrl.model.reference.kda import KimiDeltaAttention, chunked_kda
from zmrl.model.reference.mla import Indexer, MultiHeadLatentAttention, select_top_k
from zmrl.model.reference.moe import MixtureOfExperts, Router

kimi = importlib.import_module("transformers.models.kimi_linear.modeling_kimi_linear")
glm = importlib.import_module("transformers.models.glm5_next.modeling_glm5_next")

CLOSE = {"rtol": 2e-5, "atol": 2e-6}
NANO = PRESETS["nano"]


def random_module(module, seed=0, std=0.1):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in module.named_parameters():
            noise = torch.randn(p.shape, generator=generator) * std
            p.copy_(1 + noise if "norm" in name and name.endswith("weight") else noise)
    return module.eval()


def hidden(time=70, seed=1):
    return torch.randn(2, time, NANO.hidden_size, generator=torch.Generator().manual_seed(seed))


def kimi_config(num_experts=896, hidden_size=128):
    from transformers.models.kimi_linear import KimiLinearConfig

    config = KimiLinearConfig(
        hidden_size=hidden_size, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=64,
        kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, num_experts=num_experts,
        num_experts_per_token=16, num_shared_experts=2, moe_intermediate_size=32, intermediate_size=256,
        routed_scaling_factor=1.0, vocab_size=288, pad_token_id=0, bos_token_id=1, eos_token_id=2, linear_head_dim=32,
        linear_num_heads=4, layer_types=NANO.layer_types, mlp_layer_types=["dense"] + ["sparse"] * 4,
    )  # fmt: skip
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    return config


def glm_config():
    from transformers.models.glm5_next import Glm5NextTextConfig

    return Glm5NextTextConfig(
        hidden_size=128, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=64,
        kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=0, v_head_dim=32, linear_head_dim=32,
        linear_num_heads=4, linear_lower_bound=-5.0, index_topk=32, index_head_dim=32, index_n_heads=4, index_kpool=1,
        index_kpool_always_select_tail=False, layer_types=NANO.layer_types, vocab_size=288, pad_token_id=0,
    )  # fmt: skip


def copy_into(module, source):
    """Load the parameters that both have by name."""
    theirs = dict(source.named_parameters())
    with torch.no_grad():
        for name, p in module.named_parameters():
            if name in theirs:
                p.copy_(theirs[name].reshape(p.shape))


def test_kda_layer_with_bounded_gate_is_that_of_glm5_next():
    theirs = random_module(glm.Glm5NextTextLinearAttention(glm_config(), 0))
    ours = random_module(KimiDeltaAttention(NANO), seed=5)
    copy_into(ours, theirs)
    with torch.no_grad():
        for name in ("f_a_proj", "f_b_proj"):
            getattr(ours, name).weight.copy_(getattr(theirs.forget_gate, name).weight)
        ours.A_log.copy_(theirs.forget_gate.A_log)
        ours.dt_bias.copy_(theirs.forget_gate.dt_bias)
        ours.g_proj.weight.copy_(theirs.g_b_proj.weight @ theirs.g_a_proj.weight)
        for i, conv in enumerate((ours.q_conv1d, ours.k_conv1d, ours.v_conv1d)):
            conv.weight.copy_(theirs.conv1d.weight[128 * i : 128 * (i + 1)])
        # std 0.1 leaves the short convolution's outputs tiny: scale up so that the delta rule matters
        x = 10 * hidden()
        expected = theirs(x)
        for form in ("chunked", "recurrent"):
            error = (ours(x, ForwardContext(kda_form=form), 0) - expected).abs().max()
            assert error < 1e-4 * expected.abs().max()  # they sum chunks of 64 in FP32
    assert expected.abs().max() > 0.1


def test_kda_recurrence_is_that_of_kimi_linear_for_an_unbounded_decay():
    generator = torch.Generator().manual_seed(0)
    q, k, v, f = (torch.randn(2, 40, 4, 32, generator=generator) for _ in range(4))
    decay, beta = -torch.nn.functional.softplus(f), torch.rand(2, 40, 4, generator=generator)
    expected, state = kimi.recurrent_kimi_delta_attention(
        q, k, v, g=decay, beta=beta, initial_state=None, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * 32**-0.5
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    out, final = chunked_kda(q, k, v, decay, beta)
    torch.testing.assert_close(out, expected, **CLOSE)
    torch.testing.assert_close(final, state, **CLOSE)


def test_mla_is_that_of_kimi_linear():
    config = dataclasses.replace(NANO, latent_norm_eps=1e-6, index_n_heads=None, index_head_dim=None, index_topk=None)
    theirs = random_module(kimi.KimiLinearAttention(kimi_config(), 3))
    ours = random_module(MultiHeadLatentAttention(config), seed=5)
    copy_into(ours, theirs)
    x = 5 * hidden()
    mask = torch.full((70, 70), float("-inf")).triu(1)[None, None]
    with torch.no_grad():
        ours.g_proj.weight.zero_()  # sigmoid(0) = 1/2
        expected, _ = theirs(x, mask)
        torch.testing.assert_close(2 * ours(x, ForwardContext(), 3), expected, **CLOSE)
    assert expected.abs().max() > 0.1


def test_router_is_that_of_kimi_linear():
    theirs = random_module(kimi.KimiLinearTopkRouter(kimi_config()))
    ours = Router(NANO)
    with torch.no_grad():
        theirs.e_score_correction_bias.copy_(torch.randn(896, generator=torch.Generator().manual_seed(2)) * 0.1)
        ours.weight.copy_(theirs.weight)
        ours.e_score_correction_bias.copy_(theirs.e_score_correction_bias)
        _, weights, ids = theirs(hidden())
        order = ids.argsort(-1)
        mine, my_weights = ours(hidden().flatten(0, 1))
    assert torch.equal(mine, ids.gather(-1, order))
    torch.testing.assert_close(my_weights, weights.gather(-1, order), **CLOSE)


def test_routed_experts_are_those_of_kimi_linear_up_to_the_activation():
    # SiTU approaches g * sigmoid(g) * u = SiLU(g) u for large betas.
    config = dataclasses.replace(
        NANO, num_experts=24, num_experts_per_token=4, activation_situ_beta=1e4, activation_situ_linear_beta=1e4
    )
    theirs = random_module(kimi.KimiLinearExperts(kimi_config(num_experts=24, hidden_size=64)))
    ours = MixtureOfExperts(config).experts
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(50, 64, generator=generator)
    ids = torch.stack([torch.randperm(24, generator=generator)[:4] for _ in range(50)]).sort(-1).values
    weights = torch.rand(50, 4, generator=generator)
    with torch.no_grad():
        ours.w13.copy_(theirs.gate_up_proj)
        ours.w2.copy_(theirs.down_proj)
        torch.testing.assert_close(ours(z, ids, weights), theirs(z, ids, weights), **CLOSE)


def test_index_scores_choose_what_glm5_next_chooses(monkeypatch):
    theirs = random_module(glm.Glm5NextTextIndexer(glm_config(), 3))
    ours = random_module(Indexer(NANO), seed=5)
    copy_into(ours, theirs)
    x = hidden()
    latent = torch.randn(2, 70, 64, generator=torch.Generator().manual_seed(4))
    causal = torch.ones(70, 70, dtype=torch.bool).tril().expand(2, 70, 70)
    with torch.no_grad():
        chosen = theirs(x, latent, torch.ones(2, 70, dtype=torch.bool), None).long()
        expected = torch.zeros(2, 70, 71, dtype=torch.bool).scatter(-1, chosen % 71, True)[..., :70]  # -1: padding
        quantised = ours(latent, x, ours.keys(x))
        # They rank unquantised scores.
        monkeypatch.setattr(mla, "quantise_fp8", lambda t: (t, torch.ones_like(t[..., :1])))
        exact = ours(latent, x, ours.keys(x))
    best = exact.masked_fill(~causal, float("-inf")).topk(32, dim=-1).indices
    assert torch.equal(torch.zeros_like(causal).scatter(-1, best, True) & causal, expected)
    differing = (select_top_k(quantised, 32, causal) ^ expected).sum() / expected.sum()
    assert differing < 0.05  # FP8 codes and BF16 scores reorder near-ties only
    assert (quantised - exact).std() < 0.05 * exact.std()
