"""Rules on the data: what each source needs, and what would have no effect with it."""

from collections.abc import Iterator

from jaxforge.config.derived import data_source, patches_per_full_image
from jaxforge.config.schema import Config, DataConfig

# Fields that one source alone reads.
_FIELDS = {
    "digits": ("digits_max", "eval_samples"),
    "files": (
        "path", "weights", "eval_path", "media_root", "tokenizer", "chat_template", "system", "strict",
        "max_skipped_fraction", "overlong", "min_pixels", "max_pixels", "video_fps", "video_max_frames",
        "packing_window", "cache_dir",
    ),
}  # fmt: skip
# Of those, what images and videos alone need.
_MEDIA_FIELDS = ("min_pixels", "max_pixels", "video_fps", "video_max_frames")


def source_has_what_it_needs(config: Config) -> Iterator[str]:
    """Files need a path and a tokenizer, digits an encoder, and an evaluation a set of its own."""
    data, source = config.data, data_source(config)
    if source == "digits" and config.model.encoder is None:
        yield "data.source=digits shows images, but model.encoder is None; set an encoder or data.source=synthetic"
    if source == "files" and not data.path:
        yield "data.source=files needs data.path, the files to read; set it, or data.source=synthetic"
    if source == "files" and data.tokenizer is None and config.checkpoint.init_from_hf is None:
        yield (
            f"data.path={data.path} needs a tokenizer; set data.tokenizer to the folder of one, or"
            " checkpoint.init_from_hf to that of a checkpoint"
        )
    if config.train.eval_every_steps and source != "digits" and not data.eval_path:
        way_out = "set it to 0, or data.eval_path to held-out files" if source == "files" else "set it to 0"
        yield (
            f"train.eval_every_steps={config.train.eval_every_steps} would have no effect with data.source={source},"
            f" which has no evaluation set; {way_out}"
        )


def data_fields_have_an_effect(config: Config) -> Iterator[str]:
    """Fields that another source or an encoder alone reads are at their defaults."""
    data, source = config.data, data_source(config)
    for owner, names in _FIELDS.items():
        for name in names if owner != source else ():
            yield from _unless_default(data, name, f"with data.source={source}")
    if config.model.encoder is None:
        for name in (*_MEDIA_FIELDS, "max_patches_per_row"):
            yield from _unless_default(data, name, "because model.encoder is None")


def _unless_default(data: DataConfig, name: str, why: str) -> Iterator[str]:
    value, default = getattr(data, name), getattr(DataConfig, name)
    if value != default:
        comma = "," if why.startswith("because") else ""
        yield f"data.{name}={value} would have no effect{comma} {why}; leave it at {default}"


def files_are_consistent(config: Config) -> Iterator[str]:
    """A weight for each path, and bounds of an image's area that leave a size."""
    data = config.data
    if data.weights and len(data.weights) != len(data.path):
        yield (
            f"data.weights={data.weights} has {len(data.weights)} weights for the {len(data.path)} entries of"
            f" data.path={data.path}; give one for each, or none"
        )
    if data.min_pixels is not None and data.max_pixels is not None and data.min_pixels > data.max_pixels:
        yield (
            f"data.min_pixels={data.min_pixels} is above data.max_pixels={data.max_pixels}; lower it or raise the other"
        )


def patches_fit_the_row(config: Config) -> Iterator[str]:
    """A row holds whole visual tokens, and a synthetic image with its text."""
    data, encoder = config.data, config.model.encoder
    if encoder is None:
        return
    source = data_source(config)
    full, square = patches_per_full_image(encoder), encoder.spatial_merge_size**2
    patches, tokens = data.max_patches_per_row, full // square
    if patches is None:
        yield f"data.max_patches_per_row is needed with an encoder; an image of model.encoder.image_size has {full}"
    elif patches % square:
        yield (
            f"data.max_patches_per_row={patches} is not a multiple of model.encoder.spatial_merge_size^2={square};"
            f" use {-(-patches // square) * square}"
        )
    elif source == "synthetic" and full > patches:
        yield (
            f"a synthetic image of model.encoder.image_size={encoder.image_size} has {full} patches, more than"
            f" data.max_patches_per_row={patches}; use at least {full} or smaller images"
        )
    elif source == "synthetic" and tokens >= config.train.seq_length:
        yield (
            f"a synthetic image of model.encoder.image_size={encoder.image_size} becomes {tokens} visual tokens, which"
            f" with text don't fit train.seq_length={config.train.seq_length}; use smaller images or a longer row"
        )


DATA_RULES = (source_has_what_it_needs, data_fields_have_an_effect, files_are_consistent, patches_fit_the_row)
