"""What a stopped run goes on from: complete checkpoints only, with exactly the lines of the steps that are done."""

import errno
import fcntl
import json
from pathlib import Path

import pytest

from zmrl.recipe import Recipe, RecipeError
from zmrl.trainer.checkpoints import MANIFEST, CheckpointWriteError, RunCheckpoints, TrainerCheckpointError
from zmrl.trainer.logs import MISMATCH, OUTCOME, RUN, STEPS, VAL, RunFiles, best_validation, read_lines
from zmrl.trainer.resume import prepare_resume, run_lock


def fill(content: str = "weights"):
    def write(folder: Path) -> None:
        (folder / "actor").mkdir()
        (folder / "actor" / "shard.distcp").write_text(content)
        (folder / "data.pt").write_text("position")

    return write


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class TestCheckpoints:
    def test_the_latest_two_are_kept_and_the_latest_is_found(self, tmp_path):
        checkpoints = RunCheckpoints(tmp_path)
        assert checkpoints.latest(pytest.fail) is None
        for step in (5, 9, 10):
            checkpoints.write(step, fill(f"weights {step}"), {"best": step})
        assert names(checkpoints.folder) == ["global_step_10", "global_step_9"]
        found = checkpoints.latest(pytest.fail)
        assert (found.step, found.state) == (10, {"best": 10})
        assert (found.folder / "actor" / "shard.distcp").read_text() == "weights 10"

    @pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyError("bug")])
    def test_what_fails_half_way_leaves_nothing_and_touches_nothing(self, tmp_path, error):
        checkpoints = RunCheckpoints(tmp_path)
        checkpoints.write(1, fill(), {})

        def half(folder: Path) -> None:
            fill()(folder)
            raise error

        wanted = (CheckpointWriteError, "No space left") if isinstance(error, OSError) else (KeyError, "bug")
        with pytest.raises(wanted[0], match=wanted[1]):
            checkpoints.write(2, half, {})
        assert names(checkpoints.folder) == ["global_step_1"]
        assert checkpoints.latest(pytest.fail).step == 1

    def test_what_was_being_written_when_the_process_was_killed_is_no_checkpoint(self, tmp_path):
        checkpoints = RunCheckpoints(tmp_path)
        checkpoints.write(1, fill(), {})
        unfinished = checkpoints.folder / ".global_step_2.tmp"
        unfinished.mkdir()
        fill()(unfinished)
        assert checkpoints.latest(pytest.fail).step == 1
        assert names(checkpoints.folder) == ["global_step_1"]

    @pytest.mark.parametrize(
        "damage, words",
        [
            (lambda f: (f / "actor" / "shard.distcp").write_text("weightz"), "shard.distcp has changed"),
            (lambda f: (f / "actor" / "shard.distcp").write_text("weight"), "shard.distcp has changed"),
            (lambda f: (f / "data.pt").unlink(), "data.pt is missing"),
            (lambda f: (f / "more").write_text(""), "more does not belong"),
            (lambda f: (f / MANIFEST).unlink(), MANIFEST),
            (lambda f: (f / MANIFEST).write_text("{"), MANIFEST),
            (lambda f: (f / MANIFEST).write_text('{"step": 1, "files": {}}'), "that of step 1"),
        ],
    )
    def test_a_damaged_one_is_named_and_the_one_before_it_used(self, tmp_path, damage, words):
        checkpoints = RunCheckpoints(tmp_path)
        for step in (1, 2):
            checkpoints.write(step, fill(), {})
        damage(checkpoints.folder / "global_step_2")
        said = []
        assert checkpoints.latest(said.append).step == 1
        assert len(said) == 1 and "global_step_2 is damaged" in said[0] and words in said[0]
        assert names(checkpoints.folder) == ["global_step_1", "global_step_2.damaged"]
        checkpoints.write(2, fill(), {})
        assert checkpoints.latest(pytest.fail).step == 2

    def test_without_a_whole_one_left_nothing_starts(self, tmp_path):
        checkpoints = RunCheckpoints(tmp_path)
        checkpoints.write(1, fill(), {})
        (checkpoints.folder / "global_step_1" / "data.pt").unlink()
        with pytest.raises(TrainerCheckpointError, match="no checkpoint is whole"):
            checkpoints.latest(lambda line: None)


@pytest.fixture
def recipe(tmp_path) -> Recipe:
    recipe = Recipe(model="nano", output_dir=str(tmp_path / "run"), steps=6, resume="auto")
    recipe.validation.every, recipe.trainer.save_every = 2, 2
    return recipe


def stopped_run(recipe: Recipe, steps: int, checkpoint: int, validations: tuple[int, ...] = (0, 2, 4)) -> Path:
    """The folder of a run that was killed after `steps` steps."""
    files = RunFiles(recipe.output_dir)
    files.folder.mkdir()
    files.run({"recipe": recipe.to_dict()})
    (files.folder / STEPS).write_text(
        "".join(json.dumps({"step": s, "verdict": "EQUAL"}) + "\n" for s in range(1, steps + 1))
    )
    rows = [{"step": s, "dataset": "builtin", "mean_at_k": s / 10} for s in validations]
    (files.folder / VAL).write_text("".join(json.dumps(row) + "\n" for row in rows))
    if checkpoint:
        RunCheckpoints(files.folder).write(checkpoint, fill(), {})
    return files.folder


def ignore(line: str) -> None:
    """What is reported is not this test's subject."""


def steps_of(folder: Path, name: str = STEPS) -> list[int]:
    return [line["step"] for line in read_lines(folder / name)]


class TestResume:
    def test_lines_past_the_checkpoint_are_cut(self, recipe):
        folder = stopped_run(recipe, steps=5, checkpoint=4)
        with (folder / STEPS).open("a") as stream:
            stream.write('{"step": 6, "verd')  # the line that was being written
        (folder / MISMATCH).write_text('{"step": 5}')
        (folder / OUTCOME).write_text("{}")
        said = []
        point = prepare_resume(recipe, said.append)
        assert said == ["steps 5 to 5 were done after the last checkpoint and are done again"]
        assert (point.step, point.checkpoint, point.validate) == (4, folder / "checkpoints" / "global_step_4", False)
        assert steps_of(folder) == [1, 2, 3, 4] and steps_of(folder, VAL) == [0, 2, 4]
        assert not (folder / MISMATCH).exists() and not (folder / OUTCOME).exists()
        assert json.loads((folder / "mismatch-step-5.json").read_text()) == {"step": 5}

    def test_a_mismatch_that_was_warned_of_before_the_checkpoint_stays(self, recipe):
        folder = stopped_run(recipe, steps=5, checkpoint=4)
        (folder / MISMATCH).write_text('{"step": 3}')
        prepare_resume(recipe, ignore)
        assert (folder / MISMATCH).exists()

    def test_a_validation_that_the_kill_cut_short_is_done_again(self, recipe):
        folder = stopped_run(recipe, steps=4, checkpoint=4, validations=(0, 2))
        assert prepare_resume(recipe, pytest.fail).validate
        recipe.data.val = ["builtin", "other.jsonl"]  # one of two lines is there
        with (folder / VAL).open("a") as stream:
            stream.write(json.dumps({"step": 4, "dataset": "builtin", "mean_at_k": 0.4}) + "\n")
        assert prepare_resume(recipe, pytest.fail).validate
        assert steps_of(folder, VAL) == [0, 2]

    def test_without_a_checkpoint_it_starts_afresh(self, recipe):
        folder = stopped_run(recipe, steps=1, checkpoint=0, validations=(0,))
        point = prepare_resume(recipe, ignore)
        assert (point.step, point.checkpoint, point.validate) == (0, None, False)
        assert steps_of(folder) == [] and steps_of(folder, VAL) == [0]

    def test_finished_steps_of_a_run_that_saves_none_are_not_thrown_away(self, recipe):
        folder = stopped_run(recipe, steps=3, checkpoint=0)
        recipe.trainer.save_every = 0
        with pytest.raises(RecipeError, match="holds 3 steps and no checkpoint"):
            prepare_resume(recipe, pytest.fail)
        assert steps_of(folder) == [1, 2, 3]

    @pytest.mark.parametrize("name", ["notes.txt", "checkpoints/global_step_7/weights", STEPS])
    def test_a_folder_that_is_no_run_is_left_alone(self, recipe, name):
        foreign = Path(recipe.output_dir) / name
        foreign.parent.mkdir(parents=True)
        foreign.write_text("not ours")
        with pytest.raises(RecipeError, match="is not the folder of a run"):
            prepare_resume(recipe, pytest.fail)
        assert [path for path in Path(recipe.output_dir).rglob("*") if path.is_file()] == [foreign]

    def test_a_damaged_line_is_one_error(self, recipe):
        folder = stopped_run(recipe, steps=3, checkpoint=0)
        (folder / STEPS).write_text("not JSON\n")
        with pytest.raises(RecipeError, match=r"steps\.jsonl cannot be read"):
            prepare_resume(recipe, pytest.fail)

    def test_an_empty_folder_starts_afresh(self, recipe):
        assert prepare_resume(recipe, pytest.fail).validate
        assert not Path(recipe.output_dir).exists()

    def test_lost_lines_are_an_error(self, recipe):
        folder = stopped_run(recipe, steps=3, checkpoint=4)
        with pytest.raises(RecipeError, match="does not hold steps 1 to 4"):
            prepare_resume(recipe, pytest.fail)
        assert steps_of(folder) == [1, 2, 3]

    def test_a_recipe_that_trains_something_else_is_refused(self, recipe):
        folder = stopped_run(recipe, steps=5, checkpoint=4)
        recipe.trainer.lr = 0.5
        with pytest.raises(RecipeError, match=r"trainer\.lr was 0\.001 in this run and is 0\.5"):
            prepare_resume(recipe, pytest.fail)
        assert steps_of(folder) == [1, 2, 3, 4, 5]

    def test_a_key_that_the_run_did_not_know_has_its_default(self, recipe):
        folder = stopped_run(recipe, steps=5, checkpoint=4)
        run = json.loads((folder / RUN).read_text())
        del run["recipe"]["debug"], run["recipe"]["lora"]["alpha"]
        (folder / RUN).write_text(json.dumps(run))
        assert prepare_resume(recipe, ignore).step == 4

    def test_what_changes_no_bit_may_change(self, recipe):
        stopped_run(recipe, steps=5, checkpoint=4)
        recipe.threads, recipe.trainer.micro_batch_samples, recipe.steps = 7, 3, 60
        assert prepare_resume(recipe, ignore).step == 4

    def test_fewer_steps_than_are_done_are_refused(self, recipe):
        stopped_run(recipe, steps=5, checkpoint=4)
        recipe.steps = 3
        with pytest.raises(RecipeError, match="raise steps"):
            prepare_resume(recipe, ignore)

    def test_a_folder_in_use_is_refused(self, recipe, monkeypatch):
        folder = stopped_run(recipe, steps=5, checkpoint=4)
        monkeypatch.setattr("zmrl.trainer.resume.LOCK_SECONDS", 0.3)
        with (folder / ".trainer.lock").open("w") as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            with pytest.raises(RecipeError, match="in use by another run"):
                prepare_resume(recipe, pytest.fail)
        assert steps_of(folder) == [1, 2, 3, 4, 5]
        with run_lock(folder, "trainer"):
            pass

    def test_the_best_validation_is_the_first_of_the_highest(self, tmp_path):
        rows = [(0, "a", 0.2), (0, "b", 0.9), (2, "a", 0.5), (4, "a", 0.5)]
        lines = [{"step": s, "dataset": d, "mean_at_k": m} for s, d, m in rows]
        (tmp_path / VAL).write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert best_validation(tmp_path) == lines[2]
        (tmp_path / VAL).unlink()
        assert best_validation(tmp_path) is None
