"""Properties of the plain torch reference, in float64."""

import dataclasses
import importlib

import pytest
import torch

from zmrl.model.names import LoraSpec, is_indexer_tensor
from zmrl.model.reference import ForwardContext, KimiK31ForCausalLM
from zmrl.model.reference.common import RMSNorm
from zmrl.model.reference.generate import sample
from zmrl.model.reference.kda import chunked_kda, recurrent_kda
from zmrl.model.reference.mla import _hadamard, quantise_fp8, select_top_k
from zmrl.model.reference.model import attn_res_mix
from zmrl.model.reference.moe import top_k_lowest_index

TIGHT = {"rtol": 1e-10, "atol": 1e-10}


def build(config, seed=0) -> KimiK31ForCausalLM:
    """A float64 model in which every parameter matters: none stays at zero or one."""
    model = KimiK31ForCausalLM(config, torch.float64).initialise(seed)
    generator = torch.Generator().manual_seed(seed + 100)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".experts." not in name:
                p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * (0.5 if "res_proj" in name else 0.02))
    return model


@pytest.fixture
def model(small_config):
    return build(small_config)


@pytest.fixture
def ids():
    return torch.randint(0, 288, (2, 37), generator=torch.Generator().manual_seed(3))


def kda_inputs(time, dim=32, bound=-5.0):
    generator = torch.Generator().manual_seed(time)
    q, k, v, f = (torch.randn(2, time, 3, dim, generator=generator, dtype=torch.float64) for _ in range(4))
    k = torch.nn.functional.normalize(k, dim=-1)
    beta = torch.rand(2, time, 3, generator=generator, dtype=torch.float64)
    return q, k, v, bound * torch.sigmoid(2 * f), beta


@pytest.mark.parametrize("time", [1, 15, 16, 17, 50])
def test_chunked_kda_is_the_recurrence(time):
    inputs = kda_inputs(time)
    state = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for s in (None, state):
        a, b = recurrent_kda(*inputs, s), chunked_kda(*inputs, s)
        torch.testing.assert_close(a[0], b[0], **TIGHT)
        torch.testing.assert_close(a[1], b[1], **TIGHT)


@pytest.mark.parametrize("time", [1, 16, 17, 50])
@pytest.mark.parametrize("strength", [0.1, 3.0, 1000.0])
def test_chunked_kda_without_a_bound_is_the_recurrence_and_finite(time, strength):
    q, k, v, decay, beta = kda_inputs(time)
    decay = -strength * torch.nn.functional.softplus(5 * decay + 12)
    leaves = [t.float().requires_grad_() for t in (q, k, v, decay, beta)]
    found = chunked_kda(*leaves, bounded=False)
    expected = recurrent_kda(q, k, v, decay, beta)
    close = {"rtol": 1e-4, "atol": 2e-4}  # FP32 sums over a tile reach 16 * 104: differences are good to 1e-4
    torch.testing.assert_close(found[0].double(), expected[0], **close)
    torch.testing.assert_close(found[1].double(), expected[1], **close)
    found[0].sum().backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)


def test_the_bounded_form_would_overflow_without_its_bound():
    q, k, v, decay, beta = (t.float() for t in kda_inputs(32))
    assert not chunked_kda(q, k, v, 10 * decay, beta)[0].isfinite().all()
    assert chunked_kda(q, k, v, 10 * decay, beta, bounded=False)[0].isfinite().all()


def test_chunked_kda_is_finite_in_float32_at_the_strongest_decay():
    q, k, v, decay, beta = (x.float() for x in kda_inputs(48))
    decay = torch.full_like(decay, -5.0)
    for x in (q, k, v):
        x.requires_grad_()
    out, _ = chunked_kda(q, k, v, decay, beta)
    out.sum().backward()
    torch.testing.assert_close(out, recurrent_kda(q, k, v, decay, beta)[0], rtol=1e-4, atol=1e-5)
    assert all(torch.isfinite(x.grad).all() for x in (q, k, v))


def test_gradients_of_both_kda_forms_agree():
    grads = []
    for form in (recurrent_kda, chunked_kda):
        inputs = [x.clone().requires_grad_() for x in kda_inputs(21)]
        form(*inputs)[0].square().sum().backward()
        grads.append([x.grad for x in inputs])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


def test_both_kda_forms_give_the_same_logits(model, ids):
    with torch.no_grad():
        torch.testing.assert_close(model(ids), model(ids, ForwardContext(kda_form="recurrent")), **TIGHT)


@pytest.mark.parametrize("pieces", [[1] * 37, [5, 16, 1, 15], [20, 17]])
def test_continuing_from_a_state_is_the_whole_forward(model, ids, pieces):
    with torch.no_grad():
        whole, ctx, out = model(ids), ForwardContext(state=model.new_state()), []
        for part in ids.split(pieces, dim=1):
            out.append(model(part, ctx))
    torch.testing.assert_close(torch.cat(out, 1), whole, **TIGHT)


def test_logits_do_not_depend_on_later_tokens(model, ids):
    changed = ids.clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % 288
    with torch.no_grad():
        a, b = model(ids), model(changed)
    torch.testing.assert_close(a[:, :20], b[:, :20], **TIGHT)
    assert not torch.allclose(a[:, 20:], b[:, 20:])


def test_rows_of_a_batch_are_independent(model, ids):
    with torch.no_grad():
        torch.testing.assert_close(model(ids)[1:], model(ids[1:]), **TIGHT)


def test_selection_is_active_and_has_top_k_positions(model, ids, small_config):
    ctx = ForwardContext(intermediates={})
    with torch.no_grad():
        sparse, dense = model(ids, ctx), model(ids, ForwardContext(sparse=False))
    selected = ctx.intermediates["layers.3.selected"]
    expected = torch.arange(1, 38).clamp(max=small_config.index_topk)
    assert torch.equal(selected.sum(-1), expected.expand(2, -1))
    torch.testing.assert_close(sparse[:, :8], dense[:, :8], **TIGHT)
    assert not torch.allclose(sparse[:, 8:], dense[:, 8:])


def test_selection_takes_the_lower_position_on_a_tie():
    scores = torch.tensor([[0.0, -0.0, 1.0, 0.0, 1.0 + 2**-9, -1.0, 5.0]])
    allowed = torch.tensor([[True] * 6 + [False]])
    # 1 + 2^-9 rounds to 1 in BF16: position 2 ties with 4; -0.0 counts as 0.0: 1 before 3.
    for k, chosen in ((1, [2]), (2, [2, 4]), (3, [0, 2, 4]), (4, [0, 1, 2, 4]), (6, [0, 1, 2, 3, 4, 5]), (9, range(6))):
        assert select_top_k(scores, k, allowed)[0].nonzero().flatten().tolist() == list(chosen)


def test_router_takes_the_lower_expert_on_a_tie():
    values = torch.tensor([[0.5, 0.5, 0.9, 0.5, 0.1], [0.1, 0.2, 0.3, 0.4, 0.5]])
    assert top_k_lowest_index(values, 2).tolist() == [[0, 2], [3, 4]]
    assert top_k_lowest_index(values, 5).tolist() == [[0, 1, 2, 3, 4]] * 2


def test_fp8_scale_is_a_power_of_two_that_covers_the_vector():
    x = torch.randn(100, 32, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 100).unsqueeze(1)
    x[0] = 0
    x[1, 0] = 448.0
    values, scale = quantise_fp8(x)
    assert torch.equal(torch.frexp(scale).mantissa, torch.full_like(scale, 0.5))
    assert values.abs().max() <= 448
    assert scale[1] == 1.0 and scale[0] == 2.0**-22
    ratio = x[2:].abs().amax(-1) / scale[2:, 0]
    assert ((ratio > 224) & (ratio <= 448)).all()
    assert (values * scale - x).abs().max() <= (x.abs().amax() / 16)


def test_hadamard_rotation_keeps_products(small_config, ids):
    x, y = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(_hadamard(x) @ _hadamard(y).t(), x @ y.t(), **TIGHT)
    torch.testing.assert_close(_hadamard(_hadamard(x)), x, **TIGHT)
    model = build(dataclasses.replace(small_config, index_hadamard=True))
    with torch.no_grad():
        assert torch.isfinite(model(ids)).all()


def test_modules_and_stacked_experts_agree_in_values_and_gradients(model, ids):
    trainable = model.trainable()
    model(ids).square().mean().backward()
    fast = {n: p.grad.clone() for n, p in trainable.items() if p.grad is not None}
    fast_logits = model(ids).detach()
    for parameter in trainable.values():
        parameter.grad = None
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    slow_logits = model(ids)
    slow_logits.square().mean().backward()
    torch.testing.assert_close(slow_logits.detach(), fast_logits, **TIGHT)
    for name, parameter in model.named_parameters():
        if name in fast:
            torch.testing.assert_close(parameter.grad, fast[name], rtol=1e-8, atol=1e-12)
    for layer in range(1, 5):
        stem = f"model.layers.{layer}.block_sparse_moe.experts"
        experts = model.get_submodule(stem)
        for i, expert in enumerate(experts):
            both = torch.cat((expert.w1.weight.grad, expert.w3.weight.grad)) if expert.w1.weight.grad is not None else 0
            torch.testing.assert_close(fast[f"{stem}.w13"][i] - both, torch.zeros_like(experts.w13[i]), **TIGHT)


def test_expert_function_has_the_gradient_that_it_claims(small_config):
    from zmrl.model.reference.moe import _StackedExperts

    g = torch.Generator().manual_seed(0)
    z, w13, w2 = (
        torch.randn(*s, generator=g, dtype=torch.float64, requires_grad=True) for s in ((5, 4), (6, 6, 4), (6, 4, 3))
    )
    weights = torch.rand(5, 2, generator=g, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[0, 1], [1, 3], [0, 5], [1, 5], [3, 5]])  # experts 2 and 4 idle
    assert torch.autograd.gradcheck(lambda *a: _StackedExperts.apply(*a, ids, 4.0, 25.0), (z, weights, w13, w2))


def test_index_loss_trains_the_indexer_alone(model, ids):
    ctx = ForwardContext(want_index_loss=True, sparse=False)
    model(ids, ctx)
    assert len(ctx.index_losses) == 2
    torch.stack(ctx.index_losses).sum().backward()
    for name, parameter in model.trainable().items():
        moved = parameter.grad is not None and parameter.grad.abs().max() > 0
        assert moved == is_indexer_tensor(name), name


def test_a_language_model_loss_does_not_reach_the_indexer(model, ids):
    model(ids).square().mean().backward()
    assert all(p.grad is None for n, p in model.named_parameters() if is_indexer_tensor(n))


def test_attention_residual_mixes_raw_values_by_normalised_scores():
    norm, projection = RMSNorm(8, 1e-5).double(), torch.nn.Linear(8, 1, bias=False).double()
    a, b = torch.randn(2, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(attn_res_mix([a], norm, projection), a)
    mixed = attn_res_mix([a, 1000 * a, b], norm, projection)
    scores = torch.stack([(norm(x) @ projection.weight[0]) for x in (a, 1000 * a, b)])
    p = scores.softmax(0).unsqueeze(-1)
    torch.testing.assert_close(mixed, p[0] * a + p[1] * 1000 * a + p[2] * b, **TIGHT)
    torch.nn.init.zeros_(projection.weight)
    torch.testing.assert_close(attn_res_mix([a, b], norm, projection), (a + b) / 2, **TIGHT)


def test_router_bias_chooses_but_does_not_weigh(model):
    gate = model.model.layers[1].block_sparse_moe.gate
    x = torch.randn(7, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        gate.e_score_correction_bias[5] = 10.0
        ids, weights = gate(x)
        scores = torch.sigmoid(x @ gate.weight.t())
    assert (ids == 5).any(-1).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(7, dtype=torch.float64), **TIGHT)
    torch.testing.assert_close(weights, scores.gather(1, ids) / scores.gather(1, ids).sum(-1, keepdim=True), **TIGHT)


def test_peft_adapters_load_into_the_reference(small_config, ids):
    peft = importlib.import_module("peft")
    model, spec = build(small_config), LoraSpec(rank=4, alpha=4)
    with torch.no_grad():
        before = model(ids)
        config = peft.LoraConfig(r=spec.rank, lora_alpha=spec.alpha, target_modules=spec.target_modules(small_config))
        wrapped = peft.get_peft_model(model, config)
        torch.testing.assert_close(wrapped(ids), before, **TIGHT)  # B starts at zero
        names = {n.replace(".default", ""): p for n, p in wrapped.named_parameters() if "lora_" in n}
        specs = list(spec.tensor_specs(small_config))
        assert {s.name: s.shape for s in specs} == {n: tuple(p.shape) for n, p in names.items()}
        expert = names["base_model.model.model.layers.2.block_sparse_moe.experts.7.w2.lora_B.weight"]
        expert.fill_(0.1)
        assert not torch.allclose(wrapped(ids), before)


def test_greedy_sampling_is_the_argmax_of_a_full_forward(model):
    prompts = [[256, 259, 70, 260, 261], [256, 259, 70, 71, 72, 73, 74, 75, 260, 261]]
    outputs = sample(model, prompts, 12, temperature=0)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert 1 <= len(output) <= 12
        with torch.no_grad():
            logits = model(torch.tensor([prompt + output]))[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == output


def test_wrong_tensors_are_refused(small_config):
    model = KimiK31ForCausalLM(small_config)
    with pytest.raises(ValueError, match="was not given"):
        model.load_tensors([])
    with pytest.raises(ValueError, match=r"lm_head\.weight \[1\]"):
        model.load_tensors([("lm_head.weight", torch.zeros(1))])
