"""The trainer on two and on four processes ends with the bits of the trainer on one."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.megatron.test_in_trainer_process import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
"""The first test waits for all worlds: some minutes, more on a busy machine."""


class Case(NamedTuple):
    sizes: dict[str, int]
    micro_batch_samples: list[int]
    """Of each copy. Where they differ, the copy with the larger ones has fewer."""
    base: str = "model"
    """Or "skewed": all tokens go to experts 0 to 5, which the first rank has."""


LAYOUTS = {
    "DP2": Case({"data": 2}, [2, 2]),
    "DP2, other micro-batches": Case({"data": 2}, [5, 5]),
    "TP2": Case({"tensor": 2}, [3]),
    "TP2 and EP2": Case({"tensor": 2, "expert": 2}, [2]),
    "DP2 and EP2": Case({"data": 2, "expert": 2}, [5, 1]),
    "DP2 and EP2, skewed": Case({"data": 2, "expert": 2}, [2, 2], "skewed"),
    "DP2, TP2 and EP4, skewed": Case({"data": 2, "tensor": 2, "expert": 4}, [1, 5], "skewed"),
}
WITHOUT_TOKENS = {
    "DP2 and EP2": [3 + 6, 3],
    "DP2 and EP2, skewed": [3, 3],
    "DP2, TP2 and EP4, skewed": [3 + 3, 3 + 6],
}
"""By copy, in 3 updates: where it has fewer micro-batches (in `forward` the first has two, the second three), and where
its only sample has no response."""
ONE_RANK = {"model": Case({}, [2]), "skewed": Case({}, [3], "skewed")}
FOUR = "DP2, TP2 and EP4, skewed"


def run(folder: Path, size: int, layouts: list) -> list[list]:
    """What each rank says of each layout."""
    (folder / "store").unlink(missing_ok=True)
    (folder / "layouts.json").write_text(json.dumps(layouts))
    command = [sys.executable, "-m", "tests.megatron.on_ranks"]
    ranks = [
        subprocess.Popen([*command, str(r), str(size), str(folder)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for r in range(size)
    ]
    errors = [rank.communicate(timeout=800)[1] for rank in ranks]
    assert not any(rank.returncode for rank in ranks), "\n".join(error[-3000:] for error in errors)
    return [json.loads((folder / f"{r}.json").read_text()) for r in range(size)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Of the worlds of one, two and four processes, with the bases."""
    from tests.megatron.hosts import write_base

    made = {size: tmp_path_factory.mktemp(f"ranks{size}") for size in (1, 2, 4)}
    for folder in made.values():
        write_base(folder / "model")
        write_base(folder / "skewed", skewed=True)
    return made


@pytest.fixture(scope="module")
def results(folders):
    """(by base: of one rank, by layout: of all its ranks, of worlds that took over the other's checkpoint)."""
    (ones,) = run(folders[1], 1, list(ONE_RANK.values()))
    shutil.copytree(folders[1] / "layout0" / "step", folders[2] / "other")
    on_two = {name: case for name, case in LAYOUTS.items() if name != FOUR}
    *both, two_from_one = zip(*run(folders[2], 2, list(on_two.values())), strict=True)
    shutil.copytree(folders[2] / "layout0" / "step", folders[1] / "other")
    ((one_from_two,),) = run(folders[1], 1, [])
    (of_four,) = zip(*run(folders[4], 4, [LAYOUTS[FOUR]]), strict=True)
    of_ranks = dict(zip(on_two, both, strict=True)) | {FOUR: of_four}
    return dict(zip(ONE_RANK, ones, strict=True)), of_ranks, [one_from_two, *two_from_one]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_three_updates_on_several_ranks_have_the_bits_of_one(results, folders, layout):
    base, ranks = LAYOUTS[layout].base, results[1][layout]
    one = results[0][base]
    for rank in ranks:
        assert rank["norms"] == one["norms"]
        assert rank["identity"] == one["identity"]
        assert rank["tensors"] == one["tensors"]
    tensor = LAYOUTS[layout].sizes.get("tensor", 1)
    for step in range(len(one["norms"])):
        scores = [rank["scores"][step] for rank in ranks]
        assert [score for copy in scores[::tensor] for score in copy] == one["scores"][step]
        assert all(scores[rank] == scores[rank // tensor * tensor] for rank in range(len(ranks)))
    of_one = folders[1] / f"layout{list(ONE_RANK).index(base)}"
    number = list(LAYOUTS).index(layout) if layout != FOUR else 0
    file = "adapter/adapter_model.safetensors"
    assert (of_one / file).read_bytes() == (folders[len(ranks)] / f"layout{number}" / file).read_bytes()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_ranks_have_exchanged_what_the_layout_says(results, layout):
    expected = {
        "DP": {"gradients"},
        "TP": {"row-parallel sums", "column-parallel sums", "latent gradients", "head sums", "logits"},
        "EP": {"expert counts", "gradient norm"},
    }
    ranks = results[1][layout]
    for rank in ranks:
        for kind, exchanges in expected.items():
            assert (kind in layout) == (exchanges <= rank["sent"].keys()), (kind, rank["sent"])
    tensor = LAYOUTS[layout].sizes.get("tensor", 1)
    data = "DP" in layout
    assert [rank["data rank"] for rank in ranks] == [number // tensor * data for number in range(len(ranks))]
    if "EP" in layout:
        first, *others = ranks
        there, back = {"expert inputs", "expert output gradients"}, {"expert results", "expert input gradients"}
        skewed = LAYOUTS[layout].base == "skewed"
        assert there <= first["sent"].keys() if not skewed else not there & first["sent"].keys()
        assert back <= first["sent"].keys()
        for rank in others:
            assert there <= rank["sent"].keys()
            assert back <= rank["sent"].keys() if not skewed else not back & rank["sent"].keys()


@pytest.mark.parametrize("layout", WITHOUT_TOKENS)
def test_copies_without_tokens_took_part(results, layout):
    for rank in results[1][layout]:
        assert rank["without tokens"] == WITHOUT_TOKENS[layout][rank["data rank"]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_run_on_several_ranks_has_the_bits_of_an_unbroken_one(results, layout):
    one = results[0][LAYOUTS[layout].base]
    assert one["resumed"] == one["identity"]
    for rank in results[1][layout]:
        assert rank["resumed"] == one["identity"]
        assert rank["resumed norms"] == one["norms"][1:]


def test_checkpoints_pass_between_one_copy_and_two(results):
    ones, _, taken_over = results
    assert [identity for identity, _ in taken_over] == [ones["model"]["identity"]] * 3


def test_a_checkpoint_of_another_cut_of_the_model_is_refused(results):
    for _, (tensor, expert) in results[2][1:]:
        assert "tensor_parallel = 1, this run has 2" in tensor
        assert "expert_parallel = 1, this run has 2" in expert
