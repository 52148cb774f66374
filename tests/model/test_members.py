"""Members of the family beside K3.1: live tensors, invariances in bits, adapters, gradients, the released 48B model."""

import dataclasses

import peft
import pytest
import torch

from tests.model.paged import PagedHost, Request
from zmrl.batch_invariant import native
from zmrl.lora import peft_io
from zmrl.model.checkpoint import export_tensors, load_reference, write_checkpoint
from zmrl.model.config import PRESETS, ConfigError, K3Config
from zmrl.model.context import scratch_context
from zmrl.model.gradients import AdapterGradients
from zmrl.model.initialise import initial_tensors
from zmrl.model.names import PREFIX, LoraSpec, checkpoint_name, tensor_specs
from zmrl.model.transformer import KimiK31

RANK = 16
LENGTHS = [1, 5, 33, 70]
_FEW = {"num_experts": 12, "num_experts_per_token": 4}
MEMBERS = {
    "k3": dataclasses.replace(PRESETS["nano-k3"], **_FEW),
    "kimi-linear": dataclasses.replace(PRESETS["nano-linear"], **_FEW),
    # every switch the other way round than in the released model next to it, and sizes that fill no panel
    "mixed": dataclasses.replace(
        PRESETS["nano-linear"], **_FEW, hidden_size=100, moe_intermediate_size=19, intermediate_size=77,
        mla_use_output_gate=True, hidden_act="situ", q_lora_rank=20, attn_res_block_size=2,
    ),
}  # fmt: skip
each_member = pytest.mark.parametrize("member", MEMBERS)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """member -> (checkpoint, model with two adapters)."""
    found = {}

    def get(member):
        if member not in found:
            config, path = MEMBERS[member], tmp_path_factory.mktemp(member) / "model"
            write_checkpoint(path, export_tensors(config, initial_tensors(config, seed=3)), config)
            model = KimiK31.from_checkpoint(path)
            model.create_lora(slots=2, rank=RANK, alpha=RANK)
            generator = torch.Generator().manual_seed(5)
            for slot in (0, 1):
                for item in model.lora_slices(slot):
                    item.write((torch.randn(item.shape, generator=generator) * 0.1).bfloat16())
            found[member] = path, model
        return found[member]

    return get


@pytest.fixture(scope="module")
def sequences():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 256, (n,), generator=generator) for n in LENGTHS]


def bits(x):
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()])


def whole(model, ids, slot=-1):
    slots = None if slot < 0 else torch.full((len(ids),), slot, dtype=torch.int32)
    with torch.no_grad():
        return model(ids, scratch_context(model.config, [len(ids)], slots))


@each_member
def test_live_tensors_and_adapters_are_exactly_those_of_the_names(member):
    config = MEMBERS[member]
    with torch.device("meta"):
        model = KimiK31(config)
        model.create_lora(1, 32, 32)
    assert {(s.name, s.shape) for s in model.tensor_slices()} == {(n, s) for n, s, _ in tensor_specs(config)}
    expected = {(n, s) for n, s, _ in LoraSpec(32, 32).tensor_specs(config)}
    assert {(s.name, s.shape) for s in model.lora_slices(0)} == expected


@each_member
def test_what_is_loaded_reads_back_and_padding_is_zero(made, member):
    _, model = made(member)
    assert model.config == MEMBERS[member]
    for item in (*model.tensor_slices(), *model.lora_slices(1)):
        encoded = item.form.encode(item.read()).reshape(item.live().shape)
        assert torch.equal(encoded.view(torch.uint8), item.live().contiguous().view(torch.uint8)), item.name


@each_member
def test_logits_agree_with_the_float64_oracle(member, tmp_path, sequences):
    # every expert is chosen, so that BF16 activations cannot turn a near-tie around
    config = dataclasses.replace(MEMBERS[member], num_experts_per_token=12)
    write_checkpoint(tmp_path / "model", export_tensors(config, initial_tensors(config, seed=4)), config)
    model, reference = KimiK31.from_checkpoint(tmp_path / "model"), load_reference(tmp_path / "model", torch.float64)
    for ids in sequences:
        with torch.no_grad():
            expected = reference(ids[None])[0]
        assert (model.logits(whole(model, ids)) - expected).abs().max() < 0.03 * expected.abs().max()


@each_member
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_hidden_states_are_independent_of_chunks_pages_and_neighbours(made, member, sequences, chunk):
    _, model = made(member)
    requests = [Request(ids, i, slot=(-1, 0, 1)[i % 3]) for i, ids in enumerate(sequences)]
    host, pieces, steps = PagedHost(model, requests), {r.number: [] for r in requests}, 0
    while any(r.computed < len(r.ids) for r in requests):
        chunks = [(r, min(chunk, len(r.ids) - r.computed)) for r in requests if r.computed < len(r.ids)]
        for (r, _), rows in zip(chunks, host.step(chunks), strict=True):
            pieces[r.number].append(rows)
        steps += 1
    assert steps > 1
    for r in requests:
        assert torch.equal(bits(torch.cat(pieces[r.number])), bits(whole(model, r.ids, r.slot)))


@each_member
def test_hidden_states_are_independent_of_batch_threads_and_instruction_set(made, member, sequences):
    _, model = made(member)
    alone = [whole(model, ids, 0) for ids in sequences]
    slots = torch.zeros(sum(LENGTHS), dtype=torch.int32)
    before = torch.get_num_threads()
    for isa in native.available_isas():
        for threads in (1, 2):
            torch.set_num_threads(threads)
            with native.use_isa(isa), torch.no_grad():
                together = model(torch.cat(sequences), scratch_context(model.config, LENGTHS, slots))
            for rows, expected in zip(together.split(LENGTHS), alone, strict=True):
                assert torch.equal(bits(rows), bits(expected)), (isa, threads)
    torch.set_num_threads(before)
    assert not torch.equal(bits(whole(model, sequences[3])), bits(alone[3])), "the adapter does nothing: VOID"


@each_member
def test_adapter_gradients_agree_with_autograd_of_the_reference(member, tmp_path, sequences):
    config = dataclasses.replace(MEMBERS[member], num_experts_per_token=12)
    base, ids = tmp_path / "base", sequences[2]
    write_checkpoint(base, export_tensors(config, initial_tensors(config, seed=4)), config)
    model = KimiK31.from_checkpoint(base)
    model.create_lora(1, RANK, RANK)
    generator = torch.Generator().manual_seed(6)
    for item in model.lora_slices(0):
        item.write((torch.randn(item.shape, generator=generator) * 0.05).bfloat16())
    gradients = {key: torch.zeros(buffer.shape[1:]) for key, buffer in model.lora_buffers().items()}
    buffers = AdapterGradients(model)
    buffers.bind(gradients)
    direction = torch.randn(len(ids), config.vocab_size, generator=generator)
    slots = torch.zeros(len(ids), dtype=torch.int32)
    (model.logits(model(ids, scratch_context(config, [len(ids)], slots))) * direction).sum().backward()
    buffers.finish()
    ours = {item.name: item.read() for item in model.lora_slices(gradients)}

    live = {item.name: item.read() for item in model.lora_slices(0)}
    peft_io.write_adapter(tmp_path / "adapter", live, config, RANK, RANK, "base")
    wrapped = peft.PeftModel.from_pretrained(load_reference(base), tmp_path / "adapter", is_trainable=True).double()
    (wrapped(ids[None])[0] * direction).sum().backward()
    theirs = {n.replace(".default", ""): p.grad for n, p in wrapped.named_parameters() if p.requires_grad}
    assert ours.keys() == theirs.keys() == {s.name for s in LoraSpec(RANK).tensor_specs(config)}
    errors = {n: float((ours[n] - theirs[n]).norm() / theirs[n].norm()) for n in ours}
    worst = max(errors, key=errors.get)
    assert errors[worst] < 0.15, f"{worst}: {errors[worst]:.3f}"
    assert sum(errors.values()) / len(errors) < 0.03


@pytest.mark.parametrize(
    "change, named",
    [
        ({"index_n_heads": 4, "index_head_dim": 32, "index_topk": 8}, "q_lora_rank"),
        ({"latent_moe_use_norm": True}, "latent_moe_use_norm"),
        ({"routed_expert_hidden_size": 64}, "latent_moe_use_norm"),
        ({"expert_format": "mxfp4", "moe_intermediate_size": 40}, "moe_intermediate_size"),
        ({"expert_format": "mxfp4", "hidden_size": 100}, "hidden_size"),
        ({"expert_format": "int4"}, "expert_format"),
        ({"attn_res_block_size": 0}, "attn_res_block_size"),
        ({"q_lora_rank": 0}, "q_lora_rank"),
        ({"v_head_dim": 24}, "v_head_dim"),
        ({"dtype": "float16"}, "dtype"),
    ],
)
def test_a_combination_that_is_not_implemented_is_refused_by_name(change, named):
    with pytest.raises(ConfigError, match=named):
        dataclasses.replace(PRESETS["nano-linear"], **change)


def test_a_bounded_gate_does_not_lose_its_bound_unnoticed():
    values = PRESETS["nano-k3"].to_dict()
    del values["linear_attn_config"]["gate_lower_bound"]
    with pytest.raises(ConfigError, match="gate_lower_bound is missing"):
        K3Config.from_dict(values)


# moonshotai/Kimi-Linear-48B-A3B-Instruct

RELEASED = {
    "architectures": ["KimiLinearForCausalLM"], "bos_token_id": 163584, "dtype": "bfloat16", "eos_token_id": 163586,
    "first_k_dense_replace": 1, "head_dim": 72, "hidden_act": "silu", "hidden_size": 2304, "initializer_range": 0.02,
    "intermediate_size": 9216, "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128,
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
        "num_heads": 32, "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True, "model_max_length": 1048576, "model_type": "kimi_linear", "moe_intermediate_size": 1024,
    "moe_layer_freq": 1, "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "num_attention_heads": 32,
    "num_expert_group": 1, "num_experts": 256, "num_experts_per_token": 8, "num_hidden_layers": 27,
    "num_key_value_heads": 32, "num_nextn_predict_layers": 0, "num_shared_experts": 1, "pad_token_id": 163839,
    "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "rope_theta": 10000.0, "routed_scaling_factor": 2.446, "tie_word_embeddings": False, "topk_group": 1,
    "use_cache": True, "use_grouped_topk": True, "v_head_dim": 128, "vocab_size": 163840,
}  # fmt: skip


def released_names():
    """Name and shape of every tensor, written out from the released model's code and index."""
    yield from (("model.embed_tokens.weight", (163840, 2304)), ("lm_head.weight", (163840, 2304)))
    yield "model.norm.weight", (2304,)
    for layer in range(27):
        stem = f"model.layers.{layer}."
        tensors = {"input_layernorm.weight": (2304,), "post_attention_layernorm.weight": (2304,)}
        if layer in (3, 7, 11, 15, 19, 23, 26):
            attention = {
                "q_proj.weight": (6144, 2304), "kv_a_proj_with_mqa.weight": (576, 2304),
                "kv_a_layernorm.weight": (512,), "kv_b_proj.weight": (8192, 512), "o_proj.weight": (2304, 4096),
            }  # fmt: skip
        else:
            attention = {f"{n}_proj.weight": (4096, 2304) for n in "qkv"}
            attention |= {f"{n}_conv1d.weight": (4096, 1, 4) for n in "qkv"}
            attention |= {f"{n}_a_proj.weight": (128, 2304) for n in "fg"}
            attention |= {f"{n}_b_proj.weight": (4096, 128) for n in "fg"}
            attention |= {
                "A_log": (1, 1, 32, 1), "dt_bias": (4096,), "b_proj.weight": (32, 2304), "o_norm.weight": (128,),
                "o_proj.weight": (2304, 4096),
            }  # fmt: skip
        tensors |= {f"self_attn.{name}": shape for name, shape in attention.items()}
        mlps = {"mlp": 9216} if layer == 0 else {"block_sparse_moe.shared_experts": 1024}
        for name, width in mlps.items():
            tensors |= {f"{name}.{n}_proj.weight": (width, 2304) for n in ("gate", "up")}
            tensors[f"{name}.down_proj.weight"] = (2304, width)
        if layer:
            tensors["block_sparse_moe.gate.weight"] = (256, 2304)
            tensors["block_sparse_moe.gate.e_score_correction_bias"] = (256,)
            for expert in range(256):
                experts = {"w1": (1024, 2304), "w2": (2304, 1024), "w3": (1024, 2304)}
                tensors |= {f"block_sparse_moe.experts.{expert}.{n}.weight": s for n, s in experts.items()}
        yield from ((stem + name, shape) for name, shape in tensors.items())


def test_the_released_config_is_the_preset():
    config = K3Config.from_dict(RELEASED)
    assert config == PRESETS["kimi-linear-48b"]
    assert (config.layer_types.count("linear_attention"), config.has_indexer) == (20, False)
    assert 48e9 < config.total_parameters() < 50e9 and 3e9 < config.active_parameters() < 3.5e9


def test_the_released_tensors_load_on_the_meta_device():
    config = K3Config.from_dict(RELEASED)
    with torch.device("meta"):
        model = KimiK31(config)
        loader = model.loader("Kimi-Linear-48B-A3B-Instruct")
        for name, shape in released_names():
            if name.endswith("A_log"):
                shape = (32,)
            loader.load(checkpoint_name(config, name), torch.empty(shape, dtype=torch.bfloat16))
    assert loader.finish() == sum(1 for _ in released_names()) == sum(1 for _ in tensor_specs(config))
    assert all(parameter.is_meta for parameter in model.parameters())
    with pytest.raises(ValueError, match="not part of this model"):
        model.loader("x").load(f"{PREFIX}model.layers.0.self_attn.g_proj.weight", torch.empty(1, device="meta"))
