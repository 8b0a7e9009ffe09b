"""Checks that `transformers` loads exported models and that they give the logits of those they were imported from.

    JAXFORGE_PARITY_EXPORTS=exports make test ARGS=tests/parity/test_parity_exports.py
    parity/bin/python scripts/check_exports.py exports

Runs in the venv of scripts/make_parity_fixtures.py.  Each folder of `exports` is named after its fixture, whatever
follows a dot; `python -m jaxforge.convert` from and to Hugging Face may make one as well.  Its config.json names the
class, every weight must have its tensor, and the logits must lie within 1e-5 of the stored ones: the weights are the
same, so only the rounding of another CPU may differ.  Layers for multi-token prediction, which the model leaves out,
are loaded by what drafts tokens with them (`MtpModel`), and their logits compared too.  Exits with 1 where a folder
fails.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from make_multi_token_fixture import stored_logits
from make_parity_fixtures import FIXTURES, TOKENS, WRITTEN_OUT, logits_of
from transformers.modeling_layers import MtpModel

TOLERANCE = 1e-5


def problem_of(folder: Path, fixture: Path) -> tuple[str | None, float]:
    """What is wrong with an export, if anything, and its logits' largest difference from the stored ones."""
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        model_class = getattr(transformers, config.architectures[0])
        num_mtp = getattr(config, "num_mtp_layers", None)
        if num_mtp is not None:
            # the class has the number of the published model's layer
            numbers = range(config.num_hidden_layers, config.num_hidden_layers + num_mtp)
            model_class._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{number}\." for number in numbers]
        model, info = model_class.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, **WRITTEN_OUT
        )
    except Exception as error:  # whatever a release doesn't like; the other folders are checked all the same
        return f"not loaded: {error!r}", float("nan")
    wrong = {kind: sorted(map(str, names)) for kind, names in info.items() if names}
    if wrong:
        return f"loaded with {wrong}", float("nan")
    if hasattr(config, "vision_config"):
        # a model exported without a source knows no tokenizer, and no numbers of special tokens
        model.config.update(TOKENS)
    with np.load(fixture / "inputs.npz") as inputs, np.load(fixture / "expected.npz") as expected:
        difference = float(np.abs(logits_of(model.eval(), dict(inputs)) - expected["logits"]).max())
        if num_mtp:
            ahead = stored_logits(model, MtpModel.from_pretrained(model).eval(), dict(inputs))
            # NaN, on both sides, where there is no token so far ahead
            assert np.array_equal(np.isnan(ahead), np.isnan(expected["logits_ahead"]))
            difference = max(difference, float(np.nanmax(np.abs(ahead - expected["logits_ahead"]))))
    return (None if difference <= TOLERANCE else f"logits differ by more than {TOLERANCE}"), difference


def main() -> None:
    parser = argparse.ArgumentParser(description="Loads exported models with transformers and compares their logits.")
    parser.add_argument("exports", type=Path, help="folder of exported folders, each named after its fixture")
    parser.add_argument("--fixtures", type=Path, default=FIXTURES, help="by default tests/parity/fixtures")
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)  # as the expected values were computed: sums in the same order
    folders = sorted(path for path in arguments.exports.iterdir() if path.is_dir())
    if not folders:
        sys.exit(f"{arguments.exports} holds no folders; make them as this file's first lines say")
    failed = 0
    for folder in folders:
        problem, difference = problem_of(folder, arguments.fixtures / folder.name.partition(".")[0])
        failed += problem is not None
        print(f"{folder.name}: logits differ by {difference:.1e}{f': FAILED, {problem}' if problem else ''}")
    print(f"{len(folders) - failed} of {len(folders)} exports load and agree (transformers {transformers.__version__})")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
