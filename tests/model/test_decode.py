"""Decode steps in one native call: the bits of the model, from live parameters and caches, or no such step at all."""

import threading

import pytest
import torch

from tests.model.paged import PagedHost, Request
from zmrl.batch_invariant import native
from zmrl.batch_invariant.program import Program, ProgramError, recorded
from zmrl.model.checkpoint import write_random_checkpoint
from zmrl.model.decode import DecodeSteps
from zmrl.model.transformer import KimiK31

PROMPT, STEPS = 5, 8


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("nano") / "model"
    write_random_checkpoint("nano", path, seed=3)
    model = KimiK31.from_checkpoint(path)
    model.create_lora(slots=2, rank=16, alpha=16)
    generator = torch.Generator().manual_seed(5)
    for buffer in model.lora_buffers().values():
        buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)
    return model


def hosts(model, count, adapted):
    """Two hosts with the same requests after their prompts, and those requests; the second replays its steps."""
    generator = torch.Generator().manual_seed(count)
    ids = [torch.randint(0, 256, (PROMPT + i + STEPS,), generator=generator) for i in range(count)]
    steps, found = DecodeSteps(model), []
    for _ in range(2):
        requests = [Request(x, i, slot=i % 3 - 1 if adapted else -1) for i, x in enumerate(ids)]
        host = PagedHost(model, requests)
        host.step([(request, PROMPT + i) for i, request in enumerate(requests)])
        found.append(host)

    def forward(token_ids, context):
        replayed = steps(token_ids, context)
        return model(token_ids, context) if replayed is None else replayed[0].clone()

    found[1].forward = forward
    return *found, steps


def decode(host):
    return torch.cat(host.step([(request, 1) for request in host.requests])).view(torch.int16)


def equal_caches(a, b):
    pairs = [pair for one, two in zip(a.caches, b.caches, strict=True) for pair in zip(one, two, strict=True)]
    return all(torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8)) for x, y in pairs)


@pytest.mark.parametrize("isa", native.available_isas())
@pytest.mark.parametrize("count, adapted", [(1, False), (1, True), (8, False), (8, True)])
def test_replayed_steps_have_the_bits_of_the_model(model, count, adapted, isa):
    with native.use_isa(isa):
        plain, replaying, steps = hosts(model, count, adapted)
        for _ in range(STEPS):
            assert torch.equal(decode(plain), decode(replaying))
        assert steps.replayed == STEPS - 1
        assert equal_caches(plain, replaying)
        replaying.caches[-1][0][0, 0] ^= 1
        assert not equal_caches(plain, replaying), "the comparison of the caches sees nothing"


@pytest.mark.parametrize("what", ["weight", "adapter"])
def test_replayed_steps_read_live_parameters_and_adapters(model, what):
    plain, replaying, steps = hosts(model, 3, adapted=True)
    for _ in range(2):
        assert torch.equal(decode(plain), decode(replaying))
    saved = [tensor.clone() for cache in plain.caches for tensor in cache]
    before = decode(plain)
    for tensor, old in zip((tensor for cache in plain.caches for tensor in cache), saved, strict=True):
        tensor.copy_(old)
    for request in plain.requests:
        request.computed -= 1
    layer = model.layers[1]
    buffer = layer.self_attn.o_proj.weight if what == "weight" else layer.mlp.experts.lora.b2
    buffer.mul_(2)
    try:
        after = decode(plain)
        assert not torch.equal(after, before)
        assert torch.equal(decode(replaying), after)
    finally:
        buffer.mul_(0.5)
    assert steps.replayed == 2


def test_number_of_requests_may_change_from_step_to_step(model):
    plain, replaying, steps = hosts(model, 4, adapted=False)
    for count in (4, 2, 4, 2, 3):
        rows = [torch.cat(host.step([(r, 1) for r in host.requests[:count]])) for host in (plain, replaying)]
        assert torch.equal(rows[0].view(torch.int16), rows[1].view(torch.int16))
    assert steps.replayed == 2
    assert equal_caches(plain, replaying)


def test_prompts_and_foreign_operators_are_not_replayed(model, monkeypatch):
    plain, replaying, steps = hosts(model, 2, adapted=False)
    for host in (plain, replaying):
        host.step([(host.requests[0], 2), (host.requests[1], 1)])
    assert steps.replayed == 0 and not steps._steps
    norm = model.norm
    monkeypatch.setattr(model.layers[0].mlp, "forward", lambda x, context: x * norm)  # torch's own multiplication
    for _ in range(3):
        assert torch.equal(decode(plain), decode(replaying))
    assert steps.replayed == 0 and len(steps._steps) == 1


def test_a_program_names_the_kernel_that_refuses():
    slots = torch.zeros(3, dtype=torch.int32)
    x, w = torch.randn(3, 32).bfloat16(), torch.randn(1, 32, 16).bfloat16()
    a, b = torch.randn(1, 1, 32, 16).bfloat16(), torch.randn(1, 1, 16, 16).bfloat16()
    with torch.no_grad(), recorded() as recording:
        torch.ops.zmrl.linear_lora(x, w, a, b, slots, 1.0, [16])
    assert not recording.other
    program = Program(recording.calls)
    program()
    slots[1] = 7
    with pytest.raises(ProgramError, match="zm_linear failed with status -1"):
        program()


def test_recorded_steps_keep_at_most_so_many_bytes(model, monkeypatch):
    plain, replaying, steps = hosts(model, 4, adapted=True)

    def step(count):
        rows = [torch.cat(host.step([(r, 1) for r in host.requests[:count]])) for host in (plain, replaying)]
        assert torch.equal(rows[0].view(torch.int16), rows[1].view(torch.int16))
        return [key[0] for key in steps._steps]

    assert step(1) == [1] and step(2) == [1, 2]
    one, two = (kept.bytes for kept in steps._steps.values())
    assert 0 < one < two
    monkeypatch.setattr("zmrl.model.decode.MOST_BYTES", one + 2 * two)
    assert step(1) == [2, 1], "the step used longest ago comes first"
    assert step(3) == [1, 3], "three rows do not fit beside both"
    assert steps.replayed == 1
    monkeypatch.setattr("zmrl.model.decode.MOST_BYTES", one)
    assert step(2) == [2] and step(2) == [2]
    assert steps.replayed == 1, "a step too large for all of the room is not replayed"
    assert equal_caches(plain, replaying)


def test_kernels_of_another_thread_are_not_recorded():
    x, w = torch.randn(3, 32).bfloat16(), torch.randn(1, 32, 16).bfloat16()
    other = threading.Thread(target=torch.ops.zmrl.linear, args=(x, w, [16]))
    with recorded() as recording:
        other.start()
        other.join()
        assert not recording.calls
        torch.ops.zmrl.linear(x, w, [16])
    assert len(recording.calls) == 1
