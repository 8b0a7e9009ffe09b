"""How one tensor of a Hugging Face checkpoint answers to our parameters.

Each kind of tensor below says its shape there, and converts both ways with NumPy views.  A name with {} stands for one
tensor in each layer, and its paths are stacked parameters; shapes are then those of one layer.  Several entries of a
map may have the same path: each is then a part of it, and says which (`Expert`).
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor there, and the path of the parameter, or paths of the parameters, that hold its numbers here.

    Attributes:
      layers: the number that each layer of the stack has there; None where it is the same.
      dtype: what it is stored in there, whatever the others are; None is as the others.
      is_copy: whether another tensor there has the same numbers and they are read from that one; this one is written.
    """

    name: str
    path: str
    layers: tuple[int, ...] | None = dataclasses.field(default=None, kw_only=True)
    dtype: str | None = dataclasses.field(default=None, kw_only=True)
    is_copy: bool = dataclasses.field(default=False, kw_only=True)

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path,)

    def name_in(self, layer: int | None) -> str:
        """Its name there, by the layer here."""
        return self.name.format(layer if self.layers is None or layer is None else self.layers[layer])

    def hf_shape(self, shapes: Sequence[Shape]) -> Shape:
        """Its shape there, from those of our parameters."""
        raise TypeError(f"{type(self).__name__} doesn't say its shape")

    def to_ours(self, tensor: np.ndarray, shapes: Sequence[Shape]) -> list[np.ndarray]:
        """Our parameters, in the order of `paths`."""
        return [tensor.reshape(shapes[0])]

    def to_hf(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """The tensor, from our parameters in the order of `paths`."""
        return arrays[0].reshape(self.hf_shape([array.shape for array in arrays]))


class Vector(Tensor):
    """A norm's scale or a bias: one dimension there, any here."""

    def hf_shape(self, shapes):
        return (math.prod(shapes[0]),)


class Matrix(Tensor):
    """A table that has the same dimensions there and here."""

    def hf_shape(self, shapes):
        return shapes[0]


@dataclasses.dataclass(frozen=True)
class Linear(Tensor):
    """A projection: [out, in] there; [in..., out...] here, of which the first `num_inputs` are inputs."""

    num_inputs: int = 1

    def hf_shape(self, shapes):
        shape = shapes[0]
        return math.prod(shape[self.num_inputs :]), math.prod(shape[: self.num_inputs])

    def to_ours(self, tensor, shapes):
        return [tensor.T.reshape(shapes[0])]

    def to_hf(self, arrays):
        rows, columns = self.hf_shape([arrays[0].shape])
        return arrays[0].reshape(columns, rows).T


@dataclasses.dataclass(frozen=True)
class RotaryLinear(Linear):
    """A projection the last `num_rotary` of whose last dimension rotate: pairs side by side there, half apart here."""

    num_rotary: int = 0

    def to_ours(self, tensor, shapes):
        [array] = super().to_ours(tensor, shapes)
        others, pairs = np.split(array, [-self.num_rotary], axis=-1)
        return [np.concatenate([others, pairs[..., 0::2], pairs[..., 1::2]], axis=-1)]

    def to_hf(self, arrays):
        others, first, second = np.split(arrays[0], [-self.num_rotary, -self.num_rotary // 2], axis=-1)
        pairs = np.stack([first, second], axis=-1).reshape(*first.shape[:-1], self.num_rotary)
        return super().to_hf([np.concatenate([others, pairs], axis=-1)])


@dataclasses.dataclass(frozen=True)
class Expert(Tensor):
    """The matrix of one expert: [out, in] there; `number` of [experts, in, out] here."""

    number: int = 0

    def hf_shape(self, shapes):
        _, inputs, outputs = shapes[0]
        return outputs, inputs

    def to_ours(self, tensor, shapes):
        """Its part of our parameter."""
        return [tensor.T]

    def to_hf(self, arrays):
        return arrays[0][self.number].T


@dataclasses.dataclass(frozen=True)
class AllExperts(Tensor):
    """The matrices of all experts in one tensor, those of `parts` beside each other: [experts, in, out...].

    `path` is as in `Fused`; `transposed` says that the tensor is [experts, out..., in].
    """

    parts: tuple[str, ...] = ()
    transposed: bool = False

    @property
    def paths(self):
        return tuple(self.path.replace("{part}", part) for part in self.parts)

    def hf_shape(self, shapes):
        experts, inputs, outputs = shapes[0]
        outputs *= len(self.parts)
        return (experts, outputs, inputs) if self.transposed else (experts, inputs, outputs)

    def to_ours(self, tensor, shapes):
        return np.split(tensor.swapaxes(1, 2) if self.transposed else tensor, len(self.parts), axis=2)

    def to_hf(self, arrays):
        tensor = np.concatenate(arrays, axis=2)
        return tensor.swapaxes(1, 2) if self.transposed else tensor


@dataclasses.dataclass(frozen=True)
class Vocabulary(Tensor):
    """An embedding or head: the true rows there; padded here, with zeros that nothing reads."""

    num_rows: int = 0

    def hf_shape(self, shapes):
        return self.num_rows, shapes[0][1]

    def to_ours(self, tensor, shapes):
        padding = shapes[0][0] - self.num_rows
        return [np.concatenate([tensor, np.zeros((padding, tensor.shape[1]), tensor.dtype)]) if padding else tensor]

    def to_hf(self, arrays):
        return arrays[0][: self.num_rows]


@dataclasses.dataclass(frozen=True)
class PatchConvolution(Tensor):
    """The patch embedding: a convolution's [out, channel, frame, y, x] there, [channel frame y x, out] here."""

    patch: Shape = ()

    def hf_shape(self, shapes):
        return shapes[0][1], *self.patch

    def to_ours(self, tensor, shapes):
        return [tensor.reshape(tensor.shape[0], -1).T]

    def to_hf(self, arrays):
        return arrays[0].T.reshape(self.hf_shape([arrays[0].shape]))


@dataclasses.dataclass(frozen=True)
class Fused(Tensor):
    """Several projections or biases of equal size, one after the other along the tensor's first dimension.

    `path` is that of one, with {part} in place of each of `parts`; `of` makes the kind of one.
    """

    parts: tuple[str, ...] = ()
    of: type[Tensor] = Linear

    @property
    def paths(self):
        return tuple(self.path.replace("{part}", part) for part in self.parts)

    def hf_shape(self, shapes):
        first, *rest = self.of(self.name, self.path).hf_shape(shapes)
        return len(self.parts) * first, *rest

    def to_ours(self, tensor, shapes):
        one = self.of(self.name, self.path)
        pieces = np.split(tensor, len(self.parts))
        return [one.to_ours(piece, [shape])[0] for piece, shape in zip(pieces, shapes, strict=True)]

    def to_hf(self, arrays):
        one = self.of(self.name, self.path)
        return np.concatenate([one.to_hf([array]) for array in arrays])
