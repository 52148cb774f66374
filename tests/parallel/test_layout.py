"""Layouts that cannot give the bits of one rank are refused, with the sizes that would work."""

from dataclasses import replace

import pytest

from zmrl.model.config import PRESETS
from zmrl.parallel.layout import Layout, LayoutError

FULL, NANO = PRESETS["k31-pro"], PRESETS["nano"]


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(tensor=8, expert=8, context=8, block_size=64),
        Layout(tensor=8, expert=64, data=8),
        Layout(tensor=4, expert=4, context=2, block_size=48, data=2),
        Layout(expert=2, data=2),
        Layout(tensor=8, context=8, block_size=64, prefill="tokens"),
        Layout(tensor=2, interleave=16),  # without context parallelism there is nothing to interleave
    ],
)
def test_layouts_of_the_full_model(layout):
    layout.check(FULL)


@pytest.mark.parametrize(
    ("config", "layout", "message"),
    [
        (FULL, Layout(tensor=3), r"^tensor parallel size 3: .* use 1, 2, 4 or 8$"),
        (FULL, Layout(tensor=16), r"^tensor parallel size 16: .* use 1, 2, 4 or 8$"),
        (FULL, Layout(tensor=0), r"^tensor parallel size 0"),
        (FULL, Layout(tensor=8, context=6), r"^context parallel size 6: .* use 1, 2, 4 or 8$"),
        (FULL, Layout(tensor=2, context=4), r"^context parallel size 4: .* of 2; use 1 or 2$"),
        (FULL, Layout(tensor=2, context=2, interleave=64), r"^interleave 64: .* use 1$"),
        (FULL, Layout(tensor=8, context=8, block_size=36), r"^block size 36: .* multiple of 8, such as 32 or 40$"),
        (FULL, Layout(tensor=8, context=8, block_size=4), r"^block size 4: .* such as 8$"),
        (FULL, Layout(expert=5), r"^expert parallel size 5: 896 experts do not divide evenly; use 1, 2, 4, 7, 8,"),
        (FULL, Layout(expert=0), r"^expert parallel size 0"),
        (FULL, Layout(tensor=2, expert=4), r"^expert parallel size 4: .* a tensor group, here 2, .*; use 1 or 2$"),
        (FULL, Layout(tensor=2, expert=4, data=4), r"^expert parallel size 4: .* all copies, here 8; use 1, 2 or 8$"),
        (replace(FULL, num_experts=28), Layout(expert=2, data=8), r"^expert parallel size 2: .* here 8; use 1$"),
        (NANO, Layout(tensor=8), r"^tensor parallel size 8: 4 MLA heads do not divide evenly; use 1, 2 or 4$"),
        (FULL, Layout(tensor=2, prefill="rows"), r"^prefill by 'rows' is unknown; use heads or tokens$"),
        (FULL, Layout(prefill="tokens"), r"^prefill by tokens: one rank .* use heads, or more tensor ranks$"),
        (PRESETS["nano-k3"], Layout(tensor=2, prefill="tokens"), r"this model has no indexer; use heads$"),
        (replace(FULL, vocab_size=163841), Layout(tensor=2), r"163841 ids of the vocabulary .* use 1$"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(config, layout, message):
    with pytest.raises(LayoutError, match=message):
        layout.check(config)
