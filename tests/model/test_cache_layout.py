"""The block row: bytes of the full model, the planner's choice, and refusals. Against vLLM: tests/rollout."""

import dataclasses

import pytest

from zmrl.model.cache_format import CACHE_FORMATS, CacheFormat
from zmrl.model.cache_layout import BLOCK_SIZES, CacheLayout, CacheLayoutError, plan
from zmrl.model.config import PRESETS

PRO, NANO = PRESETS["k31-pro"], PRESETS["nano"]


@pytest.mark.parametrize(
    "model, latent, index, token",
    [
        ("k3", "fp8", "fp8", 13_824),
        ("k31-pro", "fp8", "fp8", 16_992),
        ("k31-pro", "nvfp4", "fp8", 11_616),
        ("k31-pro", "nvfp4", "mxfp4", 10_080),
        ("k31-pro", "fp8", "mxfp4", 15_456),
        ("k31-pro", "bf16", "fp8", 30_816),
    ],
)
def test_bytes_of_a_token_of_the_full_model(model, latent, index, token):
    formats = CacheFormat(latent, index)
    assert formats.token_bytes(PRESETS[model]) == token
    assert plan(PRESETS[model], formats, tensor_parallel=8).token_bytes == token


def test_states_of_the_full_model():
    assert plan(PRO, CacheFormat("fp8"), 1).state_bytes == 6_512_640
    assert plan(PRO, CacheFormat("fp8"), 8).state_bytes == 814_080
    assert plan(PRO, CacheFormat("fp8"), 8, 8).state_bytes == 814_080, "context parallelism does not share states"


@pytest.mark.parametrize("formats", CACHE_FORMATS, ids=str)
@pytest.mark.parametrize("name, ranks", [("nano", 1), ("nano-b", 1), ("tiny", 1), ("k31-pro", 8)])
def test_the_planner_takes_the_power_of_two_that_pads_least(name, ranks, formats):
    chosen = plan(PRESETS[name], formats, ranks)
    others = [CacheLayout(PRESETS[name], formats, size, ranks) for size in BLOCK_SIZES]
    assert chosen.padding == min(layout.padding for layout in others) < 0.06
    assert chosen.block_size & (chosen.block_size - 1) == 0


@pytest.mark.parametrize("size", BLOCK_SIZES)
@pytest.mark.parametrize("formats", CACHE_FORMATS, ids=str)
def test_a_row_holds_all_pages_or_any_group_of_states(formats, size):
    for config, ranks in ((NANO, 1), (PRO, 8)):
        layout = CacheLayout(config, formats, size, ranks)
        assert sum(layout.groups) == len(config.linear_attn_config.kda_layers)
        assert layout.row_bytes == max(size * layout.token_bytes, max(layout.groups) * layout.state_bytes)
        # no group is so large that it alone makes the row wider than one state must
        assert layout.row_bytes == max(layout.page_bytes, layout.state_bytes)


def test_padding_is_what_a_request_leaves_unused():
    layout = CacheLayout(NANO, CacheFormat(), 64)
    assert (layout.row_bytes, layout.groups, layout.state_bytes) == (25_088, [1, 1, 1], 18_688)
    rows = 32768 / 64 + 0.5 + 2 * 3
    assert layout.padding == pytest.approx(1 - (32768 * 392 + 6 * 18_688) / (rows * 25_088), abs=1e-12)


def test_a_pool_must_hold_one_request_and_the_empty_row():
    layout = CacheLayout(NANO, CacheFormat(), 64)
    needed = (16 + 6 + 1) * 25_088
    layout.check_pool(needed, 1024)
    with pytest.raises(CacheLayoutError) as error:
        layout.check_pool(needed - 1, 1024)
    for number in (str(needed - 1), "22 rows of 25088 bytes", "1024 tokens needs 23", f"give it {needed} bytes"):
        assert number in str(error.value)
    layout.check_pool(needed - 3 * 25_088, 1024, prefix_cache=False)


def test_a_kept_state_takes_a_row_of_each_group_and_lies_at_the_end_of_a_block():
    layout = CacheLayout(NANO, CacheFormat(), 64)
    assert layout.kept_state_bytes == 3 * 25_088
    for interval in (None, 0, 64, 6400):
        layout.check_retention(interval)
    for interval, nearest in ((-64, 64), (1, 64), (100, 64), (200, 192)):
        with pytest.raises(
            CacheLayoutError, match=f"{interval} is no positive multiple of the block size 64 .* use {nearest}, or 0"
        ):
            layout.check_retention(interval)


def test_context_parallel_ranks_share_tokens():
    one, eight = (CacheLayout(PRO, CacheFormat("fp8"), 256, 8, ranks) for ranks in (1, 8))
    assert one.request_rows(2**20) == 4096 + 2 * 14
    assert eight.request_rows(2**20) == 512 + 2 * 14
    assert one.row_bytes == eight.row_bytes


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"block_size": 48}, "block size 48 is no power of two; use 32 or 64"),
        ({"block_size": 0}, "block size 0 is no power of two"),
        ({"block_size": 64, "tensor_parallel": 3}, "tensor parallel size 3 does not divide the 4 KDA heads"),
        ({"block_size": 64, "tensor_parallel": 2, "context_parallel": 4}, "size 4 does not divide"),
    ],
)
def test_what_cannot_be_laid_out_is_refused_with_the_numbers(arguments, message):
    with pytest.raises(CacheLayoutError, match=message):
        CacheLayout(NANO, CacheFormat(), **arguments)


def test_a_model_without_kda_has_no_states():
    linear = dataclasses.replace(NANO.linear_attn_config, full_attn_layers=(1, 2, 3, 4, 5), kda_layers=())
    layout = plan(dataclasses.replace(NANO, linear_attn_config=linear), CacheFormat())
    assert layout.groups == []
    assert layout.row_bytes == layout.page_bytes
