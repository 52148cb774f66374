"""The formats of the cache, byte for byte, at the real dimensions (latents 512 + 64, index keys 128) and at nano's."""

import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.compressors.mx_utils import decompress_mx_scale

from tests.batch_invariant import cache_oracle as oracle
from tests.batch_invariant.chains import same_bits
from tests.batch_invariant.exactness import assert_same_on_every_isa, flushing_denormals, strided
from zmrl.batch_invariant import native
from zmrl.batch_invariant.formats import FormatError, index_key_bytes, latent_row_bytes
from zmrl.batch_invariant.library import OperatorError
from zmrl.batch_invariant.ops.latents import (
    LatentFormat,
    decode_e2m1,
    decode_e4m3,
    decode_index_keys,
    encode_e2m1,
    encode_e4m3,
    encode_index_keys,
    latent_store,
    latent_values,
)

SCALES = {"fp8": (1.0, 0.25, 0.0173), "nvfp4": (1.0,)}
LATENTS = [LatentFormat(name, scale) for name, scales in SCALES.items() for scale in scales]
SIZES = [(512, 64), (64, 16), (128, 5)]


def bits(x: torch.Tensor) -> np.ndarray:
    """Bit patterns, all NaN alike."""
    integer = {2: torch.int16, 4: torch.int32}[x.element_size()]
    return torch.where(x.isnan(), -1, x.contiguous().view(integer)).numpy()


# ---- e4m3 ------------------------------------------------------------------------------------------------------------


def test_every_e4m3_code_decodes_as_in_ml_dtypes():
    codes = torch.arange(256, dtype=torch.uint8)
    wanted = codes.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    got = decode_e4m3(codes).numpy()
    nan = np.isnan(wanted)
    assert nan.sum() == 2
    assert (np.isnan(got) == nan).all()
    assert (got[~nan].view("int32") == wanted[~nan].view("int32")).all()


@pytest.mark.parametrize("isa", native.available_isas())
def test_conversion_to_e4m3_is_that_of_ml_dtypes_below_saturation(isa):
    finite = decode_e4m3(torch.arange(127, dtype=torch.uint8)).double().numpy()
    ties = (finite[1:] + finite[:-1]) / 2  # between neighbours: to the even code
    around = np.concatenate([finite, ties, [464.0 - 2**-15]])
    around = np.concatenate(
        [around, np.nextafter(around.astype(np.float32), 1e9), np.nextafter(around.astype(np.float32), -1e9)]
    )
    random = np.random.default_rng(0).standard_normal(100000) * np.exp2(
        np.random.default_rng(1).integers(-20, 8, 100000)
    )
    x = np.concatenate([around, random, [1e-45, 1e-38, 0.0]]).astype(np.float32)
    x = x[np.abs(x) < 464]
    x = np.concatenate([x, -x])
    with native.use_isa(isa):
        got = encode_e4m3(torch.from_numpy(x)).numpy()
    wanted = x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert (got == wanted).all()
    assert len(np.unique(got)) == 254  # all codes but NaN


def test_conversion_to_e4m3_saturates_and_keeps_nan():
    x = torch.tensor([448.0, 449.0, 464.0, 480.0, 1e30, torch.inf, torch.nan])
    assert encode_e4m3(x).tolist() == [0x7E] * 6 + [0x7F]
    assert encode_e4m3(-x).tolist() == [0xFE] * 6 + [0xFF]
    assert encode_e4m3(torch.tensor([-0.0])).tolist() == [0x80]


# ---- e2m1 ------------------------------------------------------------------------------------------------------------


def test_every_e2m1_code_decodes_as_in_ml_dtypes():
    codes = torch.arange(16, dtype=torch.uint8)
    wanted = codes.numpy().view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert (decode_e2m1(codes).numpy().view("int32") == wanted.view("int32")).all()


@pytest.mark.parametrize("isa", native.available_isas())
def test_conversion_to_e2m1_is_that_of_ml_dtypes(isa):
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0], np.float32)
    x = np.concatenate([ties, np.nextafter(ties, 9), np.nextafter(ties, 0), [0, 1e-45, 1e-38, 6, 6.5, 1e30, np.inf]])
    x = np.concatenate([x, np.random.default_rng(0).standard_normal(100000) * 3]).astype(np.float32)
    x = np.concatenate([x, -x])
    with native.use_isa(isa):
        got = encode_e2m1(torch.from_numpy(x)).numpy()
    assert (got == np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)).all()
    assert len(np.unique(got)) == 16


def test_e2m1_ties_go_to_the_even_code():
    assert encode_e2m1(torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert encode_e2m1(torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0])).tolist() == [7, 15, 0, 8]


# ---- rows ------------------------------------------------------------------------------------------------------------


def latents(rank: int, pe: int) -> torch.Tensor:
    """Rows whose magnitudes run over every exponent, edges of scales, and what is not a number. BF16 [T, rank + pe]."""
    g = torch.Generator().manual_seed(rank)
    width = rank + pe
    by_row = torch.randn(280, width, generator=g) * torch.exp2(torch.arange(-150, 130).float())[:, None]
    by_group = torch.randn(200, width, generator=g) * torch.exp2(
        torch.randint(-14, 14, (200, width), generator=g).float()
    )
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)  # every BF16, shuffled
    every = every[torch.randperm(65536, generator=g)][: 65536 // width * width].view(-1, width)
    tidy = torch.randn(300, width, generator=g)
    edges = torch.zeros(64, width)
    edges[:, 0::16] = 6 * oracle_scale_edges()[:, None]  # amax / 6 around every tie of the scale
    special = torch.randn(8, width, generator=g)
    special[0], special[1] = 0.0, -0.0
    special[2, 3], special[3, rank] = torch.nan, torch.nan
    special[4, ::5], special[5, ::7] = torch.inf, -torch.inf
    special[6, 20:40] = torch.nan
    special[7] = 1e-40
    return torch.cat(
        [by_row.bfloat16(), by_group.bfloat16(), every, tidy.bfloat16(), edges.bfloat16(), special.bfloat16()]
    )


def oracle_scale_edges() -> torch.Tensor:
    """64 values at, half-way between, and just beside e4m3 numbers, from the smallest scale to the largest."""
    values = decode_e4m3(torch.tensor([1, 2, 3, 7, 8, 9, 15, 16, 56, 57, 58, 119, 120, 125, 126, 126]).byte())
    after = torch.cat([values[1:], torch.tensor([480.0])])
    return torch.cat([values, (values + after) / 2, values * 1.004, values * 0.996])


def stored_rows(kv: torch.Tensor, rank: int, fmt: LatentFormat) -> torch.Tensor:
    """The bytes of every row, from pages of five tokens, and a poisoned byte behind each page."""
    tokens, row = len(kv), latent_row_bytes(fmt.name, rank, kv.shape[1] - rank)
    blocks = -(-tokens // 5)
    buffer = torch.full((blocks, 5 * row + 1), 0xAA, dtype=torch.uint8)
    latent_store(kv, buffer[:, : 5 * row], torch.arange(tokens), 5, rank, fmt)
    assert (buffer[:, -1] == 0xAA).all()
    return buffer[:, : 5 * row].reshape(-1, row)[:tokens]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("fmt", LATENTS, ids=str)
@pytest.mark.parametrize("isa", native.available_isas())
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_latent_rows_are_those_of_independent_codecs(size, fmt, isa):
    rank, pe = size
    kv = latents(rank, pe)
    with native.use_isa(isa):
        got, values = stored_rows(kv, rank, fmt), latent_values(kv, rank, fmt)
    wanted = oracle.encode_latents(kv.float().numpy(), rank, *fmt)
    wrong = np.argwhere(got.numpy() != wanted)
    assert not len(wrong), f"{len(wrong)} bytes differ, first {wrong[0]}"
    back = torch.from_numpy(oracle.decode_latents(wanted, rank, pe, *fmt)).bfloat16()
    assert (bits(values) == bits(back)).all()
    assert not (kv.isnan() & ~values.isnan()).any(), "NaN was lost"
    assert values.isnan().any()
    assert len(np.unique(got[:, : rank // 2])) >= 254, "codes are missing"


@pytest.mark.parametrize("fmt", LATENTS, ids=str)
def test_latent_values_do_not_depend_on_strides_instruction_set_or_the_hosts_denormals(fmt):
    kv = latents(64, 16)
    wanted = assert_same_on_every_isa(lambda: latent_values(kv, 64, fmt))[0]
    assert same_bits(latent_values(strided(kv), 64, fmt), wanted)
    with flushing_denormals():
        assert same_bits(latent_values(kv, 64, fmt), wanted)


def test_a_finite_nvfp4_group_is_exact_where_its_values_are_codes_times_a_scale():
    """Codes x scales round-trip: a difference in either would show."""
    scales = decode_e4m3(torch.arange(1, 127, dtype=torch.uint8))
    codes = decode_e2m1(torch.arange(16, dtype=torch.uint8))
    kv = torch.cat([(scales[:, None] * codes).repeat(1, 4), torch.zeros(126, 16)], 1).bfloat16()
    assert same_bits(latent_values(kv, 64, LatentFormat("nvfp4")), kv)


def test_the_scale_of_group_s_stands_at_byte_8_s_mod_4_plus_s_div_4():
    kv = torch.zeros(32, 576).bfloat16()
    for s in range(32):
        kv[s, 16 * s] = 6 * 2.0 ** (s % 8 + 1)
    rows = stored_rows(kv, 512, LatentFormat("nvfp4"))[:, 320:]
    least = rows[0, 1]
    for s in range(32):
        assert (rows[s] != least).nonzero().flatten().tolist() == [8 * (s & 3) + (s >> 2)]


# ---- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", LATENTS, ids=str)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_gradient_is_straight_through_and_zero_where_clipped(fmt):
    rank, pe = 512, 64
    kv = latents(rank, pe).requires_grad_()
    grad = torch.randn(kv.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    latent_values(kv, rank, fmt).backward(grad)
    x = kv.detach().float().numpy()
    with np.errstate(over="ignore", invalid="ignore"):
        clipped = np.abs(x / np.float32(fmt.scale)) > 464
    if fmt.name == "nvfp4":
        rows = oracle.encode_latents(x, rank, *fmt)
        scales = np.empty((len(x), 32), np.float32)
        scales[:, oracle.nvfp4_order(32)] = oracle.e4m3_values(rows[:, 320:])
        with np.errstate(invalid="ignore"):
            clipped[:, :rank] = np.abs(x[:, :rank] / np.repeat(scales, 16, 1)) >= 7
    assert clipped.any()
    assert not clipped.all()
    wanted = torch.where(torch.from_numpy(clipped), 0.0, grad)
    assert same_bits(kv.grad, wanted.bfloat16())


def test_a_value_is_clipped_where_rounding_without_a_limit_would_leave_the_range():
    kv = torch.zeros(1, 80)
    kv[0, :4] = torch.tensor([464.0, 466.0, -464.0, -torch.inf])
    kv[0, 64:67] = torch.tensor([464.0, -466.0, 448.0])
    kv = kv.bfloat16().requires_grad_()
    latent_values(kv, 64, LatentFormat("fp8")).sum().backward()
    assert (kv.grad == 0).nonzero()[:, 1].tolist() == [1, 3, 65]
    kv.grad = None
    latent_values(kv, 64, LatentFormat("nvfp4")).sum().backward()
    assert (kv.grad == 0).nonzero()[:, 1].tolist() == [3, 65]  # 464 / 6 is a scale's business; infinity is beyond any


def test_bf16_latents_pass_unchanged():
    kv = latents(64, 16).requires_grad_()
    assert latent_values(kv, 64) is kv


# ---- index keys ------------------------------------------------------------------------------------------------------


def keys(d: int) -> torch.Tensor:
    """FP32 [T, d] over every exponent of FP32, edges of scales, and what is not a number."""
    g = torch.Generator().manual_seed(d)
    by_row = torch.randn(278, d, generator=g) * torch.exp2(torch.arange(-150, 128).float())[:, None]
    by_value = torch.randn(500, d, generator=g) * torch.exp2(torch.randint(-6, 6, (500, d), generator=g).float())
    edges = torch.zeros(1024, d)
    start = torch.exp2(torch.arange(-128, 128).double())
    for i, limit in enumerate((6.0, 448.0)):
        near = (start * limit).float()
        edges[512 * i : 512 * i + 256, i::32] = near[:, None]
        edges[512 * i + 256 : 512 * i + 512, i::32] = torch.nextafter(near, torch.tensor(torch.inf))[:, None]
    special = torch.randn(7, d, generator=g)
    special[0], special[1], special[2, 5] = 0.0, -0.0, torch.nan
    special[3, ::3], special[4, ::5] = torch.inf, -torch.inf
    special[5], special[6] = 1e-45, torch.nan
    return torch.cat([by_row, by_value, edges, special])


@pytest.mark.parametrize("name", ["fp8", "mxfp4"])
@pytest.mark.parametrize("d", [128, 32, 64])
@pytest.mark.parametrize("isa", native.available_isas())
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_index_keys_are_those_of_independent_codecs(d, name, isa):
    x = keys(d)
    with native.use_isa(isa):
        got = encode_index_keys(x, name)
        values = decode_index_keys(got, d, name)
    codes, scales = oracle.encode_keys(x.numpy(), name)
    wanted = np.concatenate([codes, scales.reshape(len(x), -1)], 1)
    wrong = np.argwhere(got.numpy() != wanted)
    assert not len(wrong), f"{len(wrong)} bytes differ, first {wrong[0]}"
    back, scale = oracle.decode_keys(codes, scales.reshape(len(x), -1), name)
    assert (bits(values) == bits(torch.from_numpy(back * scale[:, None]))).all()
    assert not (x.isnan() & ~values.isnan()).any(), "NaN was lost"
    assert values.isnan().any()


def test_mxfp4_scales_are_those_of_compressed_tensors():
    scales = torch.arange(1, 255, dtype=torch.uint8)  # its arithmetic is BF16: exact for these
    keys = torch.cat([torch.full((254, 16), 0x22, dtype=torch.uint8), scales[:, None]], 1)
    assert torch.equal(decode_index_keys(keys, 32, "mxfp4")[:, 0], decompress_mx_scale(scales).float())


def test_mxfp4_clips_no_finite_value():
    x = keys(128)
    x = x[x.isfinite().all(1)]
    packed = encode_index_keys(x, "mxfp4")
    scale = packed[:, 64:].numpy().view(oracle.E8M0).astype(np.float64).repeat(32, 1)
    assert (np.abs(x.numpy()) / scale).max() <= 6.0


# ---- sizes -----------------------------------------------------------------------------------------------------------


def test_sizes_are_those_of_the_specification():
    assert [latent_row_bytes(name, 512, 64) for name in ("bf16", "fp8", "nvfp4")] == [1152, 576, 352]
    assert [latent_row_bytes(name, 64, 16) for name in ("bf16", "fp8", "nvfp4")] == [160, 80, 52]
    assert [index_key_bytes(name, 128) for name in ("fp8", "mxfp4")] == [132, 68]
    assert [index_key_bytes(name, 32) for name in ("fp8", "mxfp4")] == [36, 17]


def test_a_format_that_the_sizes_do_not_allow_is_refused_with_the_numbers():
    with pytest.raises(FormatError, match="kv_lora_rank 80 is no multiple of 64"):
        latent_row_bytes("nvfp4", 80, 5)
    with pytest.raises(FormatError, match="index_head_dim 48 is no multiple of 32"):
        index_key_bytes("mxfp4", 48)
    with pytest.raises(FormatError, match=r"'fp4' is unknown; choose bf16, fp8, nvfp4"):
        latent_row_bytes("fp4", 64, 16)
    with pytest.raises(OperatorError, match=r"^format: latent format nvfp4: kv_lora_rank 80"):
        latent_values(torch.zeros(1, 85).bfloat16(), 80, LatentFormat("nvfp4"))
    with pytest.raises(OperatorError, match=r"^scale"):
        latent_values(torch.zeros(1, 85).bfloat16(), 80, LatentFormat("fp8", 0.0))
