"""The bytes that are foretold are those that groups count."""

import pytest
import torch

from tests.batch_invariant.test_linear import Layer, rows
from tests.parallel.shards import WORLDS
from tests.parallel.test_linear import run_columns, run_rows
from zmrl.model.config import PRESETS
from zmrl.parallel import costs
from zmrl.parallel import group as group_module

TOKENS = 16


@pytest.fixture
def sent(monkeypatch):
    """Bytes of all ranks by what was exchanged, of every simulation."""
    groups = []

    class Recorded(group_module._SimulatedGroup):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            groups.append(self)

    monkeypatch.setattr(group_module, "_SimulatedGroup", Recorded)
    return lambda *what: {sum(n for key, n in g.sent.items() if key in what) for g in groups}


@pytest.mark.parametrize("size", WORLDS)
def test_row_parallel_bytes(size, sent):
    layer, slots = Layer([48], 32), torch.zeros(TOKENS, dtype=torch.int32)
    run_rows(layer, rows(TOKENS, 32), rows(TOKENS, 48), slots, size)
    # Once with gradients, once without.
    wanted = [costs.row_parallel(TOKENS, 48, size, layer.rank, training) for training in (True, False)]
    assert sent("row-parallel sums", "row-parallel rows", "row-parallel t") == {sum(wanted)}


@pytest.mark.parametrize("size", WORLDS)
def test_column_parallel_bytes(size, sent):
    layer, slots = Layer([48, 16], 32), torch.zeros(TOKENS, dtype=torch.int32)
    run_columns(layer, [False, True], rows(TOKENS, 32), rows(TOKENS, 64), slots, size)
    names = [f"column-parallel {what}" for what in ("sums", "rows", "dt")]
    assert sent(*names) == {costs.column_parallel_backward(TOKENS, 32, size, 2, layer.rank)}


def test_full_model_on_eight_ranks():
    found = {cost.what: cost for cost in costs.layer_costs(PRESETS["k31-pro"], 64, 8, 32)}
    down, selection = found["dense or shared down_proj"], found["DCP selection"]
    assert down.invariant * 4 == down.plain * 6
    assert selection.plain == 64 * 7 * 16384
    assert selection.plain / selection.invariant == pytest.approx(10.64, abs=0.01)
