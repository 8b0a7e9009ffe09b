"""The format of a row: its sizes, and the shape and dtype of each of its arrays."""

import dataclasses

import numpy as np

from jaxforge.config.errors import ConfigError
from jaxforge.config.schema import Config
from jaxforge.data.patches import patch_channels

# The arrays of a row that the encoder alone reads.
PATCH_KEYS = ("patches", "patch_segments", "patch_windows", "patch_positions", "patch_grids")


@dataclasses.dataclass(frozen=True)
class RowFormat:
    """Sizes of a row.

    Attributes:
      seq_length: tokens.
      max_patches: patches, a multiple of merge^2; 0 for a language model, whose rows have no vision arrays.
      merge: side, in patches, of the square that becomes one visual token.
      channels: numbers in a patch.
      mrope: whether visual tokens have positions in two dimensions; if not, positions count tokens.
    """

    seq_length: int
    max_patches: int = 0
    merge: int = 1
    channels: int = 0
    mrope: bool = True

    @classmethod
    def from_config(cls, config: Config) -> "RowFormat":
        """The rows that a run's model reads.  Raises ConfigError for an unusable data.max_patches_per_row."""
        encoder, max_patches = config.model.encoder, config.data.max_patches_per_row
        if encoder is None:
            return cls(config.train.seq_length)
        square = encoder.spatial_merge_size**2
        if not max_patches or max_patches < 0 or max_patches % square:
            raise ConfigError(
                f"data.max_patches_per_row={max_patches} is not a positive multiple of"
                f" model.encoder.spatial_merge_size squared ({square}); use"
                f" {max(1, (max_patches or 0) // square) * square}"
            )
        return cls(
            seq_length=config.train.seq_length,
            max_patches=max_patches,
            merge=encoder.spatial_merge_size,
            channels=patch_channels(encoder),
            mrope=config.model.decoder.mrope_section is not None,
        )

    def holds(self, tokens: int, patches: int) -> bool:
        """Whether documents of so many tokens and patches together fit one row."""
        return tokens <= self.seq_length and patches <= self.max_patches

    @property
    def arrays(self) -> dict[str, tuple[tuple[int, ...], type]]:
        """Shape and dtype of each array of a row, as docs/architecture.md describes them."""
        tokens, patches = self.seq_length, self.max_patches
        text: dict[str, tuple[tuple[int, ...], type]] = {
            "tokens": ((tokens,), np.int32),
            "targets": ((tokens,), np.int32),
            "segment_ids": ((tokens,), np.int32),
            "positions": ((3, tokens), np.int32),
        }
        if not patches:
            return text
        return text | {
            "visual_index": ((tokens,), np.int32),
            "patches": ((patches, self.channels), np.float32),
            "patch_segments": ((patches,), np.int32),
            "patch_windows": ((patches,), np.int32),
            "patch_positions": ((patches, 2), np.int32),
            "patch_grids": ((patches, 2), np.int32),
        }
