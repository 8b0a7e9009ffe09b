"""Each kind of tensor, both ways, against values written by hand."""

import numpy as np
import pytest

from jaxforge.checkpoint.hf.tensors import (
    AllExperts,
    Expert,
    Fused,
    Linear,
    Matrix,
    PatchConvolution,
    RotaryLinear,
    Tensor,
    Vector,
    Vocabulary,
)


def numbers(*rows) -> np.ndarray:
    return np.array(rows, np.float32)


def assert_both_ways(tensor: Tensor, there: np.ndarray, here: list[np.ndarray]):
    """`there` is the tensor of the Hugging Face checkpoint, `here` are our parameters."""
    shapes = [array.shape for array in here]
    assert tensor.hf_shape(shapes) == there.shape
    ours = tensor.to_ours(there, shapes)
    assert len(ours) == len(here)
    for found, expected in zip(ours, here, strict=True):
        assert found.shape == expected.shape and np.array_equal(found, expected)
    back = tensor.to_hf(here)
    assert back.shape == there.shape and np.array_equal(back, there)


def test_a_vector_has_one_dimension_there():
    assert_both_ways(Vector("t", "p"), numbers(1, 2, 3), [numbers(1, 2, 3)])
    # the bias of two heads of two
    assert_both_ways(Vector("t", "p"), numbers(1, 2, 3, 4), [numbers([1, 2], [3, 4])])


def test_a_matrix_is_the_same_there():
    assert_both_ways(Matrix("t", "p"), numbers([1, 2, 3], [4, 5, 6]), [numbers([1, 2, 3], [4, 5, 6])])


def test_a_linear_map_is_transposed():
    assert_both_ways(Linear("t", "p"), numbers([1, 2], [3, 4], [5, 6]), [numbers([1, 3, 5], [2, 4, 6])])


def test_the_outputs_of_a_projection_to_heads_lie_head_after_head():
    # two inputs, two heads of three: rows there are h0k0, h0k1, h0k2, h1k0, ...
    there = numbers([1, 2], [3, 4], [5, 6], [7, 8], [9, 10], [11, 12])
    here_DHK = numbers([[1, 3, 5], [7, 9, 11]], [[2, 4, 6], [8, 10, 12]])
    assert_both_ways(Linear("t", "p"), there, [here_DHK])


def test_the_inputs_of_a_projection_from_heads_lie_head_after_head():
    # two heads of two, three outputs: columns there are h0k0, h0k1, h1k0, h1k1
    there = numbers([1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12])
    here_HKD = numbers([[1, 5, 9], [2, 6, 10]], [[3, 7, 11], [4, 8, 12]])
    assert_both_ways(Linear("t", "p", num_inputs=2), there, [here_HKD])


def test_pairs_that_rotate_lie_side_by_side_there():
    # one input, two heads of one feature that doesn't rotate and four that do: a0 b0 a1 b1 there, a0 a1 b0 b1 here
    there = numbers([1], [2], [3], [4], [5], [6], [7], [8], [9], [10])
    here_DHK = numbers([[1, 2, 4, 3, 5], [6, 7, 9, 8, 10]])
    assert_both_ways(RotaryLinear("t", "p", num_rotary=4), there, [here_DHK])
    # without heads, of which keys share what rotates
    assert_both_ways(RotaryLinear("t", "p", num_rotary=4), there[:5], [numbers([1, 2, 4, 3, 5])])


def test_an_expert_is_a_slice_here():
    # three experts of two inputs and one output
    here_EDF = numbers([[1], [2]], [[3], [4]], [[5], [6]])
    for number, there in enumerate((numbers([1, 2]), numbers([3, 4]), numbers([5, 6]))):
        expert = Expert("t", "p", number=number)
        assert expert.hf_shape([here_EDF.shape]) == there.shape
        assert np.array_equal(expert.to_hf([here_EDF]), there)
        assert np.array_equal(expert.to_ours(there, [here_EDF.shape])[0], here_EDF[number])


def test_all_experts_in_one_tensor_have_gate_and_up_side_by_side():
    # two experts of two inputs and one inner feature: columns are gate, up
    there = numbers([[1, 2], [3, 4]], [[5, 6], [7, 8]])
    gate_EDF, up_EDF = numbers([[1], [3]], [[5], [7]]), numbers([[2], [4]], [[6], [8]])
    together = AllExperts("t", "moe/{part}", parts=("gate", "up"))
    assert together.paths == ("moe/gate", "moe/up")
    assert_both_ways(together, there, [gate_EDF, up_EDF])
    turned = numbers([[1, 3], [2, 4]], [[5, 7], [6, 8]])
    assert_both_ways(AllExperts("t", "moe/{part}", parts=("gate", "up"), transposed=True), turned, [gate_EDF, up_EDF])


def test_layers_of_a_stack_may_have_other_numbers_there():
    assert [Vector("layers.{}.b", "p").name_in(layer) for layer in (0, 1)] == ["layers.0.b", "layers.1.b"]
    some = Vector("layers.{}.b", "p", layers=(1, 3))
    assert [some.name_in(layer) for layer in (0, 1)] == ["layers.1.b", "layers.3.b"]
    assert Vector("b", "p").name_in(None) == "b"


def test_a_vocabulary_is_padded_with_zeros_here_and_true_there():  # F11
    there, padded = numbers([1, 2], [3, 4], [5, 6]), numbers([1, 2], [3, 4], [5, 6], [0, 0])
    assert_both_ways(Vocabulary("t", "p", num_rows=3), there, [padded])
    assert_both_ways(Vocabulary("t", "p", num_rows=3), there, [there])
    trained = numbers([1, 2], [3, 4], [5, 6], [7, 8])
    assert np.array_equal(Vocabulary("t", "p", num_rows=3).to_hf([trained]), there)


def test_a_patch_convolution_is_a_matrix_from_channel_frame_row_column():
    # two outputs; one channel, two frames, one row, two columns
    there = numbers([[[[1, 2]], [[3, 4]]]], [[[[5, 6]], [[7, 8]]]])
    here_CD = numbers([1, 5], [2, 6], [3, 7], [4, 8])
    assert there.shape == (2, 1, 2, 1, 2)
    assert_both_ways(PatchConvolution("t", "p", patch=(1, 2, 1, 2)), there, [here_CD])


def test_a_fused_projection_is_query_then_key_then_value():
    fused = Fused("t", "layer/{part}", parts=("q", "k", "v"), of=Linear)
    assert fused.paths == ("layer/q", "layer/k", "layer/v")
    # two inputs, one head of two for each
    there = numbers([1, 2], [3, 4], [5, 6], [7, 8], [9, 10], [11, 12])
    here = [numbers([[1, 3]], [[2, 4]]), numbers([[5, 7]], [[6, 8]]), numbers([[9, 11]], [[10, 12]])]
    assert_both_ways(fused, there, here)


def test_a_fused_bias_is_query_then_key_then_value():
    fused = Fused("t", "layer/{part}", parts=("q", "k", "v"), of=Vector)
    assert_both_ways(fused, numbers(1, 2, 3, 4, 5, 6), [numbers([1, 2]), numbers([3, 4]), numbers([5, 6])])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_the_dtype_stays(dtype):
    there = numbers([1, 2], [3, 4], [5, 6]).astype(dtype)
    assert Vocabulary("t", "p", num_rows=3).to_ours(there, [(4, 2)])[0].dtype == dtype
    assert Linear("t", "p").to_ours(there, [(2, 3)])[0].dtype == dtype
