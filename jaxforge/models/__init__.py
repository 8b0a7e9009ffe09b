"""Models as mathematics: Flax NNX modules whose parameters carry logical axis names.

No module here knows a mesh or calls a collective; what must be sharded is said by name through a
`jaxforge.ops.placement.Placement`.  Shape suffixes are listed in `jaxforge.ops`.
"""

from jaxforge.models.vlm import VisionLanguageModel

__all__ = ["VisionLanguageModel"]
