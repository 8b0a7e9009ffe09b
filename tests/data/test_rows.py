"""The format of a row, which the model is compiled for."""

import pytest
from data_configs import text_config, vision_config

from jaxforge.config.errors import ConfigError
from jaxforge.data import RowFormat, eval_source, train_source
from jaxforge.data.digits import DigitsSource
from jaxforge.data.synthetic import SyntheticSource

TWO_FRAMES = {"in_channels": 3, "temporal_patch_size": 2}


@pytest.mark.parametrize(
    "config",
    [
        text_config(),
        vision_config("synthetic"),
        vision_config("synthetic", encoder=TWO_FRAMES),
        vision_config("digits"),
        vision_config("digits", encoder=TWO_FRAMES),
        vision_config("digits", encoder={"model_type": "qwen3_vit"}),
    ],
)
def test_rows_of_every_source_are_what_the_step_is_compiled_for(config):
    row = train_source(config).row(2)
    assert {key: (array.shape, array.dtype) for key, array in row.items()} == RowFormat.from_config(config).arrays


def test_a_row_has_the_documented_shapes():
    # 3 channels, 2 frames, patches of 8 x 8: 384 numbers
    arrays = RowFormat.from_config(vision_config("digits", encoder=TWO_FRAMES)).arrays
    assert {key: shape for key, (shape, _) in arrays.items()} == {
        "tokens": (128,),
        "targets": (128,),
        "segment_ids": (128,),
        "positions": (3, 128),
        "visual_index": (128,),
        "patches": (256, 384),
        "patch_segments": (256,),
        "patch_windows": (256,),
        "patch_positions": (256, 2),
        "patch_grids": (256, 2),
    }


@pytest.mark.parametrize("patches, way_out", [(None, "use 4"), (0, "use 4"), (-4, "use 4"), (30, "use 28")])
def test_patches_must_make_whole_squares(patches, way_out):
    with pytest.raises(ConfigError, match=rf"data.max_patches_per_row={patches} .*{way_out}"):
        RowFormat.from_config(vision_config("synthetic", data={"max_patches_per_row": patches}))


def test_the_config_chooses_the_source():
    assert isinstance(eval_source(vision_config("digits")), DigitsSource)
    assert isinstance(train_source(vision_config("synthetic")), SyntheticSource)
    assert eval_source(vision_config("synthetic")) is None
