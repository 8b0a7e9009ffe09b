"""The main job from the command line: it resumes, stops, and refuses bad input with one message."""

import json
import math
import os
import shutil
import signal
import socket

import pytest
import yaml
from commands import RECIPES, end_at_step, losses, rows, run, run_here, start

pytestmark = pytest.mark.usefixtures("shared_programs")
TEXT = f"--config={RECIPES / 'tiny_text.py'}"
# of three layers, which two stages can share
DIGITS = (f"--config={RECIPES / 'tiny_digits.py'}", "--config.model.decoder.num_layers=3")
LONG = "--config.train.steps=400"

CONTRACT = {
    "step", "loss", "grad_norm", "learning_rate", "target_tokens", "tokens", "padding_fraction", "images",
    "step_seconds", "tokens_per_second", "tflops_per_device", "mfu", "data_wait_seconds", "peak_device_bytes",
}  # fmt: skip


@pytest.fixture
def unused_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def whole_run(shared_programs, tmp_path_factory):
    """An uninterrupted run of 12 steps, saved at 5, 10 and 12: (workdir, what it printed)."""
    workdir = tmp_path_factory.mktemp("whole")
    code, output = run_here("train", TEXT, f"--workdir={workdir}")
    assert code == 0, output
    return workdir, output


def test_a_run_says_what_it_will_do_before_it_compiles(whole_run):
    lines = whole_run[1].splitlines()
    compiled = next(number for number, line in enumerate(lines) if line.startswith("compiled in"))
    before = "\n".join(lines[:compiled])
    assert "8 x simulated CPU device in 1 process: decoder TP 2, DP 4" in before
    # 8 rows a step, 4 data parallel ranks, 1 row each at once
    assert "2 microbatches of 1 row on each data parallel rank" in before
    # embedding and head 256 x 32, two layers of 2 x 32 x 32 + 2 x 32 x 16 + 3 x 32 x 64 weights, five norms of 32
    assert f"decoder {(2 * 256 * 32 + 2 * (2048 + 1024 + 6144) + 5 * 32) / 1e6:.2f} M" in before


def test_every_step_has_a_row_with_the_fields_that_others_read(whole_run):
    found = rows(whole_run[0])
    assert [row["step"] for row in found] == list(range(1, 13))
    for row in found:
        assert CONTRACT <= row.keys()
        assert row["mfu"] is None and row["images"] == 0
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["step_seconds"])
        assert row["padding_fraction"] == pytest.approx(1 - row["tokens"] / (8 * 32))
        assert 0 <= row["data_wait_seconds"] <= row["step_seconds"]


def test_the_first_loss_is_that_of_a_model_that_knows_nothing(whole_run):
    # 256 tokens at weights of deviation 0.02: logits are near 0
    assert losses(whole_run[0])[1] == pytest.approx(math.log(256), abs=0.05)


def test_the_run_directory_says_where_each_value_comes_from(whole_run):
    text = (whole_run[0] / "config.yml").read_text()
    assert yaml.safe_load(text)["train"]["steps"] == 12
    steps = next(line for line in text.splitlines() if line.strip().startswith("steps:"))
    assert "tiny_text.py" in steps


def test_the_same_command_again_has_nothing_to_do(whole_run):
    before = (whole_run[0] / "metrics.jsonl").read_text()
    code, output = run_here("train", TEXT, f"--workdir={whole_run[0]}")
    assert code == 0
    assert "resuming from step 12" in output and "nothing to train" in output
    assert (whole_run[0] / "metrics.jsonl").read_text() == before


def resumed_from(step, whole_run, tmp_path):
    """A copy of the whole run as it was once `step` was saved and a few more steps were logged."""
    copy = tmp_path / "copy"
    shutil.copytree(whole_run[0], copy)
    for folder in (copy / "checkpoints").iterdir():
        if folder.name.isdigit() and int(folder.name) > step:
            shutil.rmtree(folder)
    return copy


def test_a_resumed_run_repeats_the_rest_bit_for_bit(whole_run, tmp_path):
    copy = resumed_from(10, whole_run, tmp_path)
    code, output = run_here("train", TEXT, f"--workdir={copy}")
    assert code == 0 and "resuming from step 10" in output
    assert losses(copy) == losses(whole_run[0])
    assert [row["step"] for row in rows(copy)] == list(range(1, 13))


@pytest.mark.slow
def test_a_checkpoint_continues_at_another_layout(whole_run, tmp_path):
    copy = resumed_from(10, whole_run, tmp_path)
    code, output = run_here("train", TEXT, f"--workdir={copy}", "--config.parallel.tensor_model_parallel_size=1")
    assert code == 0 and "changed since: parallel.tensor_model_parallel_size: 2 -> 1" in output
    assert losses(copy)[11] == pytest.approx(losses(whole_run[0])[11], rel=1e-6)


def test_a_refused_command_changes_nothing_in_the_workdir(whole_run, tmp_path):
    copy = resumed_from(12, whole_run, tmp_path)
    before = {name: (copy / name).read_text() for name in ("config.yml", "metrics.jsonl")}
    code, output = run_here("train", TEXT, f"--workdir={copy}", "--config.train.steps=8")
    assert code == 2 and "train.steps=8" in output and "holds step 12" in output and "Traceback" not in output
    code, output = run_here("train", TEXT, f"--workdir={copy}", "--config.model.decoder.hidden_size=64")
    assert code == 2 and "of another model" in output and "Traceback" not in output
    assert {name: (copy / name).read_text() for name in before} == before
    assert not (copy / "config.1.yml").exists()


def test_a_truncated_checkpoint_is_passed_over_for_the_one_before(whole_run, tmp_path, caplog):
    copy = resumed_from(12, whole_run, tmp_path)
    files = [path for path in (copy / "checkpoints" / "12" / "state").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    code, output = run_here("train", TEXT, f"--workdir={copy}")
    assert code == 0
    assert "checkpoint of step 12 is damaged" in caplog.text and "resuming from step 10" in output
    assert losses(copy) == losses(whole_run[0])
    assert (copy / "checkpoints" / "12.broken").is_dir()


def test_a_run_that_lost_its_checkpoints_begins_again_and_keeps_its_metrics_aside(whole_run, tmp_path):
    copy = resumed_from(0, whole_run, tmp_path)
    before = (copy / "metrics.jsonl").read_text()
    code, output = run_here("train", TEXT, f"--workdir={copy}")
    assert code == 0 and "starting at step 0" in output
    assert losses(copy) == losses(whole_run[0])
    assert (copy / "metrics.1.jsonl").read_text() == before


@pytest.fixture(scope="module")
def killed_run(tmp_path_factory):
    """A run killed at step 8: (workdir, its process, what a second run got there meanwhile)."""
    workdir = tmp_path_factory.mktemp("killed")
    with start("train", TEXT, f"--workdir={workdir}") as process:
        try:
            assert any(line == "compiling the train step\n" for line in process.stdout)
            second = run_here("train", TEXT, f"--workdir={workdir}")
            assert process.poll() is None
            end_at_step(process, workdir, 8, signal.SIGKILL)
        finally:
            process.kill()
    return workdir, process, second


@pytest.mark.slow
def test_a_second_run_in_the_same_workdir_is_refused(killed_run):
    _, process, (code, output) = killed_run
    assert code == 2
    assert "is in use by process" in output and str(process.pid) in output and "Traceback" not in output


@pytest.mark.slow
def test_a_killed_run_ends_like_one_that_was_not(killed_run, whole_run):
    # what is repeated was compiled in another process
    workdir, process, _ = killed_run
    assert process.returncode == -signal.SIGKILL
    code, _ = run_here("train", TEXT, f"--workdir={workdir}")
    assert code == 0
    assert losses(workdir) == losses(whole_run[0])


@pytest.mark.slow
def test_sigterm_saves_and_ends_well(tmp_path):
    one_device = ["--config.train.simulated_devices=1", "--config.parallel.tensor_model_parallel_size=1"]
    flags = [*one_device, LONG, "--config.checkpoint.save_every_steps=0"]
    process = start("train", TEXT, f"--workdir={tmp_path}", *flags)
    output = end_at_step(process, tmp_path, 3, signal.SIGTERM)
    assert process.returncode == 0, output
    last = rows(tmp_path)[-1]["step"]
    assert last < 400 and f"stopped by SIGTERM; saved step {last}: the same command resumes" in output
    assert [path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.isdigit()] == [str(last)]


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_the_run_with_its_step_and_rows(tmp_path):
    # the first update throws every weight to about 1e30, so that step 2 overflows
    rate = ["--config.optimizer.learning_rate=1e30", "--config.optimizer.lr_warmup_iters=0"]
    code, output = run_here("train", TEXT, f"--workdir={tmp_path}", *rate)
    assert code == 1
    assert "step 2: loss" in output and "rows 8 to 15 of the data" in output and "Traceback" not in output
    assert "train.max_skipped_steps=1" in output


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--config.train.stepz=3"], ["train has no field 'stepz'", "did you mean steps"]),
        (["--config.parallel.tensor_model_parallel_size=3"], ["tensor_model_parallel_size=3", "num_query_groups=2"]),
        (["--config.parallel.context_parallel_size=2"], ["context parallelism", "isn't built yet"]),
        (["--config.parallel.pipeline_model_parallel_layout=Et|L"], ["pipeline_model_parallel_layout", "effect"]),
        (["--config.train.steps=many"], ["train.steps", "many"]),
        (["--workdir=/proc/nowhere"], ["--workdir", "/proc/nowhere"]),
        (["--confg.train.steps=3"], ["--confg.train.steps=3"]),
        (["--config.model.encoder=no.yaml"], ["no.yaml"]),
    ],
)  # fmt: skip
def test_bad_input_gets_one_message_and_exit_code_2(flags, words, tmp_path):
    workdir = [] if any(flag.startswith("--workdir") for flag in flags) else [f"--workdir={tmp_path}"]
    code, output = run_here("train", TEXT, *workdir, *flags)
    assert code == 2, output
    assert output.startswith("config error: ") and "Traceback" not in output
    for word in words:
        assert word in output


def test_in_a_process_of_its_own_the_message_is_all_that_a_refused_run_prints(tmp_path):
    code, output = run("train", TEXT, f"--workdir={tmp_path}", "--config.train.simulated_devices=7")
    assert code == 2, output
    assert output.startswith("config error: ") and output.count("\n") == 1
    assert "7" in output and "tensor_model_parallel_size=2" in output


def test_a_yaml_with_an_unknown_key_is_refused(tmp_path):
    file = tmp_path / "vit.yaml"
    file.write_text("model_type: qwen2_5_vit\nnum_layers: 2\nhiden_size: 32\n")
    code, output = run("train", TEXT, f"--workdir={tmp_path / 'run'}", f"--config.model.encoder={file}")
    assert code == 2 and "hiden_size" in output and "Traceback" not in output
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def digits_run(shared_programs, tmp_path_factory):
    """Four steps on images, evaluated at the end: (workdir, what it printed)."""
    workdir = tmp_path_factory.mktemp("digits")
    code, output = run_here("train", *DIGITS, f"--workdir={workdir}")
    assert code == 0, output
    return workdir, output


@pytest.mark.slow
def test_evaluate_gives_the_accuracy_that_training_ended_with(digits_run):
    workdir, output = digits_run
    last = rows(workdir)[-1]
    assert last["step"] == 4 and 0 <= last["eval/exact_match"] <= 1 and last["eval/target_tokens"] > 16
    in_training = next(line for line in output.splitlines() if "exact match" in line)
    pictures = {path.name for path in (workdir / "pictures").iterdir()}
    assert pictures == {"loss.png", "throughput.png", "data_wait.png", "predictions.png"}
    images = [row["images"] for row in rows(workdir) if "images" in row]
    assert all(count > 0 for count in images)

    code, output = run_here("evaluate", *DIGITS, f"--workdir={workdir}")
    assert code == 0
    assert output.splitlines()[-1] == in_training


def in_two_processes(port: int, *flags: str) -> list[str]:
    """A run of two processes of two devices each: what they printed."""
    processes = [
        start(
            "train",
            *flags,
            "--config.train.simulated_devices=2",
            JAXFORGE_COORDINATOR=f"127.0.0.1:{port}",
            JAXFORGE_NUM_PROCESSES="2",
            JAXFORGE_PROCESS_ID=str(rank),
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs
    return outputs


@pytest.mark.slow
def test_two_processes_train_like_one(whole_run, tmp_path, unused_port):
    outputs = in_two_processes(unused_port, TEXT, f"--workdir={tmp_path}")
    assert "4 x simulated CPU device in 2 processes" in outputs[0]
    alone, together = losses(whole_run[0]), losses(tmp_path)
    assert alone.keys() == together.keys()
    for step, loss in alone.items():
        assert together[step] == pytest.approx(loss, rel=1e-6)


@pytest.mark.slow
def test_two_processes_that_share_a_pipeline_and_its_images_train_like_one(digits_run, tmp_path, unused_port):
    # a stage in each process: the images of a row are encoded in both
    flags = [
        "--config.parallel.pipeline_model_parallel_size=2",
        "--config.parallel.pipeline_model_parallel_layout=Et|ttL",
        "--config.parallel.enable_full_hetero_dp=true",
        "--config.logging.pictures=false",
    ]
    in_two_processes(unused_port, *DIGITS, *flags, f"--workdir={tmp_path}")
    alone, together = losses(digits_run[0]), losses(tmp_path)
    assert alone.keys() == together.keys() == {1, 2, 3, 4}
    for step, loss in alone.items():
        assert together[step] == pytest.approx(loss, rel=1e-6)
    alone, together = rows(digits_run[0])[-1], rows(tmp_path)[-1]
    assert together["eval/loss"] == pytest.approx(alone["eval/loss"], rel=1e-6)
    assert together["eval/exact_match"] == alone["eval/exact_match"]


def test_metrics_are_plain_json(whole_run):
    for line in (whole_run[0] / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} isn't JSON"))
