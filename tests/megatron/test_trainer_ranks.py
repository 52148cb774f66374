"""The trainer on two processes ends with the bits of the trainer on one."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.megatron.test_in_trainer_process import CHECKS

LAYOUTS = {
    "DP2": ({"data": 2}, 2),
    "DP2, other micro-batches": ({"data": 2}, 5),
    "TP2": ({"tensor": 2}, 3),
    "TP2 and EP2": ({"tensor": 2, "expert": 2}, 2),
}


def run(folder: Path, size: int, layouts: list) -> list[list]:
    """What each rank says of each layout."""
    (folder / "store").unlink(missing_ok=True)
    (folder / "layouts.json").write_text(json.dumps(layouts))
    command = [sys.executable, "-m", "tests.megatron.on_ranks"]
    ranks = [
        subprocess.Popen(
            [*command, str(r), str(size), str(folder)], cwd=CHECKS.parents[2], stderr=subprocess.PIPE, text=True
        )
        for r in range(size)
    ]
    errors = [rank.communicate(timeout=500)[1] for rank in ranks]
    assert not any(rank.returncode for rank in ranks), "\n".join(error[-3000:] for error in errors)
    return [json.loads((folder / f"{r}.json").read_text()) for r in range(size)]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """(of one rank, by layout: of both ranks, of worlds that took over the other's checkpoint, the folders)."""
    from tests.megatron import checks
    from zmrl.model.checkpoint import export_tensors, write_checkpoint
    from zmrl.model.initialise import initial_tensors

    single, double = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    write_checkpoint(single / "model", export_tensors(checks.CONFIG, initial_tensors(checks.CONFIG, 5)), checks.CONFIG)
    shutil.copytree(single / "model", double / "model")
    ((one,),) = run(single, 1, [[{}, 2]])
    shutil.copytree(single / "layout0" / "step", double / "other")
    *both, two_from_one = zip(*run(double, 2, list(LAYOUTS.values())), strict=True)
    shutil.copytree(double / "layout0" / "step", single / "other")
    ((one_from_two,),) = run(single, 1, [])
    return one, dict(zip(LAYOUTS, both, strict=True)), [one_from_two, *two_from_one], (single, double)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_three_updates_on_two_ranks_have_the_bits_of_one(results, layout):
    one, both, _, folders = results
    for rank in both[layout]:
        assert rank["norms"] == one["norms"]
        assert rank["identity"] == one["identity"]
        assert rank["tensors"] == one["tensors"]
    data = "DP" in layout
    for step in range(len(one["norms"])):
        scores = [rank["scores"][step] for rank in both[layout]]
        assert (scores[0] + scores[1] if data else scores[0]) == one["scores"][step]
        assert data or scores[1] == scores[0]
    names = ("layout0", f"layout{list(LAYOUTS).index(layout)}")
    of_one, of_two = (folder / name / "adapter" for folder, name in zip(folders, names, strict=True))
    file = "adapter_model.safetensors"
    assert (of_one / file).read_bytes() == (of_two / file).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_ranks_have_exchanged_what_the_layout_says(results, layout):
    expected = {
        "DP": {"gradients"},
        "TP": {"row-parallel sums", "column-parallel sums", "latent gradients", "head sums", "logits"},
        "EP": {"expert inputs", "expert input gradients", "gradient norm"},
    }
    for rank in results[1][layout]:
        for kind, exchanges in expected.items():
            assert (kind in layout) == (exchanges <= rank["sent"].keys()), (kind, rank["sent"])
    assert [rank["data rank"] for rank in results[1][layout]] == ([0, 1] if "DP" in layout else [0, 0])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_run_on_two_ranks_has_the_bits_of_an_unbroken_one(results, layout):
    one, both, _, _ = results
    assert one["resumed"] == one["identity"]
    for rank in both[layout]:
        assert rank["resumed"] == one["identity"]
        assert rank["resumed norms"] == one["norms"][1:]


@pytest.mark.slow
def test_checkpoints_pass_between_one_copy_and_two(results):
    one, _, taken_over, _ = results
    assert [identity for identity, _ in taken_over] == [one["identity"]] * 3


@pytest.mark.slow
def test_a_checkpoint_of_another_cut_of_the_model_is_refused(results):
    for _, message in results[2][1:]:
        assert "tensor_parallel = 1, this run has 2" in message
