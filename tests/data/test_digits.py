"""The digits source: true answers, held-out digits, rows that can be learned from and generated on."""

import numpy as np
import pytest
from data_configs import text_config, vision_config
from sklearn.datasets import load_digits

from jaxforge.config.errors import ConfigError
from jaxforge.data.digit_images import CHANCES, digit_images, draw, largest_image, lay_out
from jaxforge.data.digits import QUESTIONS, DigitsSource
from jaxforge.data.packing import IGNORE
from jaxforge.data.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()


@pytest.fixture(scope="module")
def train_source():
    return DigitsSource(vision_config(), "train")


def chances(seed, digits_max=6):
    return np.random.default_rng(seed).random((digits_max + 1, CHANCES)).tolist()


def test_no_digit_is_in_both_splits_and_a_fifth_of_each_class_is_held_out():
    train, held_out = digit_images("train"), digit_images("eval")
    assert not set(train.indexes) & set(held_out.indexes)
    assert set(train.indexes) | set(held_out.indexes) == set(range(1797))
    for label in "0123456789":
        share = held_out.labels.count(label) / (held_out.labels + train.labels).count(label)
        assert 0.19 < share < 0.21  # classes have about 180 digits, so rounding moves a share by 0.003


@pytest.mark.parametrize("split", ["train", "eval"])
def test_images_are_composed_of_the_digits_that_their_labels_name(split):
    digits, original = digit_images(split), load_digits()
    assert digits.labels == tuple(str(label) for label in original.target[digits.indexes])
    ink = np.asarray(digits.atlas)
    for number in (0, 39, 40, len(digits.labels) - 1):  # across the end of a row of the atlas
        x, y = (int(part) for part in digits.middle(number))
        drawn = ink[y - 4 : y + 4, x - 4 : x + 4]
        assert np.abs(drawn - original.images[digits.indexes[number]] * 255 / 16).max() <= 0.5


def test_a_drawn_digit_is_its_original_enlarged():
    # A crude reading by the nearest original must find the very digit that was drawn.
    digits = digit_images("eval")
    originals = load_digits().images[digits.indexes]
    found = 0
    for seed in range(20):
        layout = lay_out(chances(seed), digits, 6, cell=16)
        image = 255 - draw(layout, digits, augment=False).astype(float)
        for box in layout.boxes:
            part = image[box.top : box.top + box.side, box.left : box.left + box.side]
            # sample the box, 9 original pixels across, at the 8 x 8 original pixels
            at = ((np.arange(8) + 1) * box.side / 9).astype(int)
            distance = np.abs(originals * (255 / 16) - part[np.ix_(at, at)]).mean(axis=(1, 2))
            found += int(np.argmin(distance)) == box.number
    total = sum(len(lay_out(chances(seed), digits, 6, cell=16).boxes) for seed in range(20))
    assert found > 0.9 * total  # sampling at whole pixels confuses a few near twins


def test_boxes_lie_inside_the_image_apart_and_in_reading_order():
    digits = digit_images("train")
    for seed in range(300):
        layout = lay_out(chances(seed), digits, 6, cell=16)
        for box in layout.boxes:
            assert 0 <= box.left and box.left + box.side <= layout.width
            assert 0 <= box.top and box.top + box.side <= layout.height
        for before, after in zip(layout.boxes, layout.boxes[1:], strict=False):
            below = after.top // 16 > before.top // 16  # on a later line
            assert after.left >= before.left + before.side or below
            assert not below or after.top >= before.top + before.side


def test_images_have_one_to_six_digits_of_varied_size_on_one_line_to_three_with_blanks():
    digits = digit_images("train")
    layouts = [lay_out(chances(seed), digits, 6, cell=16) for seed in range(600)]
    assert {len(layout.boxes) for layout in layouts} == {1, 2, 3, 4, 5, 6}
    assert {box.side for layout in layouts for box in layout.boxes} == {11, 12, 13, 14, 15, 16}
    # one line: 1 digit, half of 2, a third of 3 to 6, that is 17 of 36; two lines: 11 of 36; three: 8 of 36
    # (600 draws have a standard deviation of at most 12; 48 is four of them)
    lines = [layout.height // 16 for layout in layouts]
    for number, share in ((1, 17 / 36), (2, 11 / 36), (3, 8 / 36)):
        assert abs(lines.count(number) - 600 * share) < 48
    blanks = [layout.height * layout.width // 256 - len(layout.boxes) for layout in layouts]
    assert set(blanks) == {0, 1, 2, 3, 4, 5}  # five: four digits on 3 x 3 cells


@pytest.mark.parametrize(
    "digits_max, size",
    [(1, (16, 32)), (2, (32, 32)), (6, (48, 48))],  # one digit and a blank; 2 x 2 cells; 3 x (6 / 3 + 1) cells
)
def test_no_image_is_larger_than_the_bound_on_which_the_checks_rely(digits_max, size):
    digits = digit_images("train")
    assert largest_image(digits_max, 16) == size
    layouts = [lay_out(chances(seed, digits_max), digits, digits_max, cell=16) for seed in range(300)]
    assert max(layout.height * layout.width for layout in layouts) == size[0] * size[1]


def test_answers_are_true_and_every_kind_and_wording_occurs(train_source):
    asked = set()
    for index in range(200):
        sample = train_source.sample(index)
        asked.add((sample.kind, sample.question))
        if sample.kind == "count":
            assert 1 <= int(sample.answer) <= 6
        elif sample.kind == "largest":
            assert len(sample.answer) == 1
        assert sample.image.dtype == np.uint8 and sample.image.ndim == 2
    assert asked == {(kind, wording) for kind, wordings in QUESTIONS.items() for wording in wordings}


@pytest.mark.parametrize(
    "kind, expected", [("read", lambda shown: shown), ("count", lambda shown: str(len(shown))), ("largest", max)]
)
def test_an_answer_follows_from_the_digits_shown(train_source, kind, expected):
    digits = digit_images("train")
    plans = [train_source._plan(index) for index in range(40)]
    of_kind = [plan for plan in plans if plan.kind == kind]
    assert of_kind
    for plan in of_kind:
        assert plan.answer == expected("".join(digits.labels[box.number] for box in plan.layout.boxes))


def test_a_document_asks_then_shows_an_image_and_trains_the_answer_and_its_end(train_source):
    sample = train_source.sample(3)
    document = train_source.document(sample)
    squares = sample.image.size // 16**2
    prompt = [TOKENIZER.question, *TOKENIZER.encode(sample.question)]
    prompt += [TOKENIZER.image] * squares + [TOKENIZER.answer]
    answer = [*TOKENIZER.encode(sample.answer), TOKENIZER.end]
    assert document.tokens.tolist() == prompt + answer
    assert document.targets().tolist() == [IGNORE] * (len(prompt) - 1) + answer + [IGNORE]


def test_training_pixels_are_normalised_to_mean_zero_and_deviation_one(train_source):
    documents = [train_source.document(train_source.sample(index)) for index in range(300)]
    pixels = np.concatenate([document.images[0].patches_PC.ravel() for document in documents])
    assert abs(pixels.mean()) < 0.05 and abs(pixels.std() - 1) < 0.05  # the constants have two digits


def test_paper_is_bright_ink_dark_and_colours_are_alike():
    grey, colour = (DigitsSource(vision_config(encoder={"in_channels": n}), "eval") for n in (1, 3))
    sample = grey.sample(0)
    pixels = grey.document(sample).images[0].patches_PC
    assert pixels.max() == pytest.approx((1 - 0.89) / 0.23)  # paper, 255
    assert (0 - 0.89) / 0.23 <= pixels.min() < -3  # ink, 0 at its darkest
    in_colour = colour.document(sample).images[0].patches_PC
    assert in_colour.tolist() == np.tile(pixels, 3).tolist()


def test_the_same_row_twice_is_the_same(train_source):
    again = DigitsSource(vision_config(), "train")
    again.row(9)  # what was asked before makes no difference
    for key, array in train_source.row(5).items():
        np.testing.assert_array_equal(array, again.row(5)[key], err_msg=key)


def test_rows_differ_by_index_and_by_seed(train_source):
    other_seed = DigitsSource(vision_config(train={"seed": 1}), "train")
    first = train_source.row(0)["tokens"].tolist()
    assert first != train_source.row(1)["tokens"].tolist()
    assert first != other_seed.row(0)["tokens"].tolist()


def test_held_out_samples_are_the_same_for_every_seed():
    one, other = (DigitsSource(vision_config(train={"seed": seed}), "eval").sample(4) for seed in (0, 1))
    assert (one.question, one.answer) == (other.question, other.answer)
    np.testing.assert_array_equal(one.image, other.image)


def test_rows_are_well_filled_with_several_images_of_varied_size(train_source):
    rows = [train_source.row(index) for index in range(30)]
    assert np.mean([(row["segment_ids"] > 0).mean() for row in rows]) > 0.9
    assert min(row["segment_ids"].max() for row in rows) >= 2
    grids = {tuple(grid) for row in rows for grid in row["patch_grids"].tolist()}
    assert len(grids) > 10


def test_every_evaluation_document_has_room_for_the_longest_answer():
    source = DigitsSource(vision_config(data={"eval_samples": 50}), "eval")
    rows, documents = source.eval_rows()
    assert [document.sample_index for document in documents] == list(range(50))
    for document in documents:
        row, end = rows[document.row], document.prompt_end
        room = row["segment_ids"][end + 1 : end + 1 + 7]  # digits_max + 1
        assert room.tolist() == [row["segment_ids"][end]] * 7 and room[0] > 0


def test_an_evaluation_document_says_where_its_answer_starts():
    source = DigitsSource(vision_config(data={"eval_samples": 50}), "eval")
    rows, documents = source.eval_rows()
    for document in documents:
        row, end = rows[document.row], document.prompt_end
        answer = [*TOKENIZER.encode(document.answer), TOKENIZER.end]
        assert row["tokens"][end] == TOKENIZER.answer
        assert row["targets"][end : end + 8].tolist() == answer + [IGNORE] * (8 - len(answer))
        sample = source.sample(document.sample_index)
        assert (sample.answer, sample.kind) == (document.answer, document.kind)
    assert sum((row["targets"] != IGNORE).sum() for row in rows) == sum(len(d.answer) + 1 for d in documents)


@pytest.mark.parametrize("multiple", [1, 8])
def test_empty_rows_fill_up_the_evaluation(multiple):
    rows, documents = DigitsSource(vision_config(), "eval").eval_rows(rows_multiple=multiple)
    used = max(document.row for document in documents) + 1
    assert len(rows) % multiple == 0 and 0 <= len(rows) - used < multiple
    assert not any(row["segment_ids"].any() for row in rows[used:])


@pytest.mark.parametrize(
    "config, message",
    [
        (text_config(), "model.encoder=None"),
        (vision_config(encoder={"in_channels": 4}), "model.encoder.in_channels=4"),
        (vision_config(decoder={"vocab_size": 260}), "model.decoder.vocab_size=260 .*use 261 or more"),
        # six digits: 3 x 3 squares (48 x 48 pixels), 2 marks, "how many?", 6 digits and an end: 27 tokens
        (vision_config(train={"seq_length": 26}), "up to 27 tokens, train.seq_length=26"),
        (vision_config(data={"max_patches_per_row": 32}), "up to 36 patches, data.max_patches_per_row=32"),
        (vision_config(encoder={"image_size": (32, 64)}), r"model.encoder.image_size=\(32, 64\)"),
        (vision_config(data={"digits_max": 0}), "data.digits_max=0"),
    ],
)
def test_a_config_that_cannot_hold_the_samples_is_refused_by_name(config, message):
    with pytest.raises(ConfigError, match=message):
        DigitsSource(config, "train")


def test_the_smallest_sufficient_row_holds_every_sample():
    source = DigitsSource(vision_config(train={"seq_length": 27}, data={"max_patches_per_row": 36}), "eval")
    assert min(source.row(index)["segment_ids"].max() for index in range(20)) >= 1
    source.eval_rows()


def test_what_a_row_costs_are_its_patches():
    source = DigitsSource(vision_config(), "train")
    patches = [int((source.row(index)["patch_segments"] > 0).sum()) for index in range(3, 8)]
    assert source.costs(3, 5).tolist() == patches
    assert len(set(patches)) > 1
