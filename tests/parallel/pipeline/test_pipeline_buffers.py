"""Buffer slots, by running the schedule with them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxforge.parallel.pipeline.buffers import visit_slots
from jaxforge.parallel.pipeline.layout import PipelineLayout
from jaxforge.parallel.pipeline.schedule import make_schedule


@st.composite
def pipelines(draw):
    """A schedule and how many values each stage keeps; uneven, empty stages too."""
    pipeline_size, virtual_stages = draw(st.integers(1, 16)), draw(st.integers(1, 4))
    num_stages = pipeline_size * virtual_stages
    counts = draw(st.lists(st.integers(0, 3), min_size=num_stages, max_size=num_stages))
    return make_schedule(pipeline_size, virtual_stages, draw(st.integers(1, 64))), counts


@settings(max_examples=120, deadline=None, derandomize=True, database=None)
@given(pipelines())
def test_every_backward_reads_what_its_forward_wrote_and_nothing_alive_is_overwritten(pipeline):
    schedule, counts = pipeline
    slots = visit_slots(schedule, counts)
    for rank in range(schedule.pipeline_size):
        pool = {}  # slot -> the value in it, as long as it is alive
        most = 0
        for tick in range(schedule.num_ticks):
            microbatch, chunk = schedule.forward[tick, rank].tolist()
            used = slots.write[tick, rank].tolist()
            count = counts[chunk * schedule.pipeline_size + rank] if microbatch >= 0 else 0
            assert used[count:] == [-1] * (len(used) - count)
            for value, slot in enumerate(used[:count]):
                assert 0 <= slot < slots.num_slots and slot not in pool
                pool[slot] = (microbatch, chunk, value)
            most = max(most, len(pool))
            microbatch, chunk = schedule.backward[tick, rank].tolist()
            used = slots.read[tick, rank].tolist()
            count = counts[chunk * schedule.pipeline_size + rank] if microbatch >= 0 else 0
            assert used[count:] == [-1] * (len(used) - count)
            for value, slot in enumerate(used[:count]):
                assert pool.pop(slot) == (microbatch, chunk, value)
        assert not pool and most <= slots.num_slots


@settings(max_examples=120, deadline=None, derandomize=True, database=None)
@given(pipelines())
def test_there_are_as_many_slots_as_values_alive_at_a_time_on_the_fullest_rank(pipeline):
    schedule, counts = pipeline
    alive_RT = np.zeros((schedule.pipeline_size, schedule.num_ticks + 1), int)
    for stage, count in enumerate(counts):
        rank = stage % schedule.pipeline_size
        np.add.at(alive_RT[rank], schedule.forward_tick_MS[:, stage], count)
        np.add.at(alive_RT[rank], schedule.backward_tick_MS[:, stage] + 1, -count)
    assert visit_slots(schedule, counts).num_slots == np.cumsum(alive_RT, axis=1).max()


def test_a_small_pool_by_hand():
    # 2 ranks, 2 microbatches; rank 0 has 1 layer and goes forward in ticks 0, 1 and backward in 2, 3; rank 1 has 2
    # layers and does both in ticks 1, 2
    schedule = make_schedule(2, 1, 2)
    slots = visit_slots(schedule, (1, 2))
    assert slots.num_slots == 2
    used_before, again = slots.write[0, 0, 0], slots.write[1, 0, 0]
    assert sorted([used_before, again]) == [0, 1]
    assert slots.write[:, 0].tolist() == [[used_before, -1], [again, -1], [-1, -1], [-1, -1]]
    assert slots.read[:, 0].tolist() == [[-1, -1], [-1, -1], [used_before, -1], [again, -1]]
    assert slots.write[:, 1].tolist() == slots.read[:, 1].tolist()
    assert [sorted(row) for row in slots.write[:, 1].tolist()] == [[-1, -1], [0, 1], [0, 1], [-1, -1]]


def test_one_value_a_visit_takes_a_slot_for_each_chunk_in_flight():
    schedule = make_schedule(4, 2, 12)
    slots = visit_slots(schedule, [1] * 8)
    assert slots.write.shape == slots.read.shape == (schedule.num_ticks, 4, 1)
    assert slots.num_slots == schedule.max_chunks_in_flight.max() == 11
    assert ((slots.write[..., 0] >= 0) == (schedule.forward[..., 0] >= 0)).all()
    assert ((slots.read[..., 0] >= 0) == (schedule.backward[..., 0] >= 0)).all()


@pytest.mark.parametrize("num_microbatches", [8, 32, 64])
def test_the_pool_does_not_grow_with_the_microbatches(num_microbatches):
    # 11 chunks in flight on rank 0, with 4 layers in each
    slots = visit_slots(make_schedule(4, 2, num_microbatches), [4] * 8)
    assert slots.num_slots == 44


def test_uneven_stages_waste_no_slots():
    # rank 0: 7 microbatches in flight with 1 layer; rank 1: 5 with 2; rank 2: 3 with 3; rank 3: 1 with 2
    slots = visit_slots(make_schedule(4, 1, 16), (1, 2, 3, 2))
    assert slots.num_slots == 10


def test_values_that_no_stage_keeps_need_no_slot():
    # the third microbatch enters in tick 4 and is back 2 x 3 ticks later: ticks 0 to 10
    slots = visit_slots(make_schedule(2, 2, 3), [0, 0, 0, 0])
    assert slots.num_slots == 0
    assert slots.write.shape == (11, 2, 0)


PRIME = 10007  # exact arithmetic in place of floats


@pytest.mark.parametrize("num_microbatches", [1, 3, 4, 7])
@pytest.mark.parametrize(
    "layout",
    [
        PipelineLayout(2, (3, 2, 2, 1), (0,) * 4),
        PipelineLayout(2, (0, 3, 1, 0), (0,) * 4),
        PipelineLayout(3, (1, 2, 2), (0,) * 3),
        PipelineLayout(1, (4,), (0,)),
    ],
)
def test_ranks_in_lockstep_compute_the_gradients_of_the_whole_model(layout, num_microbatches):
    # layer l multiplies by weights[l]; the loss is the sum of outputs, so d loss / d weights[l] is the sum of inputs
    # times the product of the other weights
    rng = np.random.default_rng(0)
    weights = rng.integers(1, PRIME, layout.num_layers)
    inputs = rng.integers(1, PRIME, num_microbatches)
    expected = [sum(map(int, inputs)) % PRIME] * layout.num_layers
    for layer in range(layout.num_layers):
        for other in set(range(layout.num_layers)) - {layer}:
            expected[layer] = expected[layer] * int(weights[other]) % PRIME

    schedule = make_schedule(layout.pipeline_size, layout.virtual_stages, num_microbatches)
    slots = visit_slots(schedule, layout.num_layers_by_stage)
    ranks = range(layout.pipeline_size)
    weights_RK = np.where(layout.layer_order >= 0, weights[layout.layer_order], 0)
    gradients_RK = np.zeros_like(weights_RK)
    pool = rng.integers(1, PRIME, (layout.pipeline_size, slots.num_slots))  # whatever memory holds
    activations, gradients = pool[:, 0].copy(), pool[:, 0].copy()
    for tick in range(schedule.num_ticks):
        # one permute to the next rank, one to the previous; idle ranks send on what they have
        activations, gradients = np.roll(activations, 1), np.roll(gradients, -1)
        for rank in ranks:
            microbatch, chunk = schedule.forward[tick, rank]
            if (rank, chunk) == (0, 0) and microbatch >= 0:
                activations[rank] = inputs[microbatch]
            first_slot, num_layers = layout.chunk_table[rank, chunk]
            for i in range(num_layers if microbatch >= 0 else 0):
                pool[rank, slots.write[tick, rank, i]] = activations[rank]
                activations[rank] = activations[rank] * weights_RK[rank, first_slot + i] % PRIME
            microbatch, chunk = schedule.backward[tick, rank]
            if (rank, chunk) == (layout.pipeline_size - 1, layout.virtual_stages - 1) and microbatch >= 0:
                gradients[rank] = 1
            first_slot, num_layers = layout.chunk_table[rank, chunk]
            for i in reversed(range(num_layers if microbatch >= 0 else 0)):
                gradient = gradients[rank] * pool[rank, slots.read[tick, rank, i]]
                gradients_RK[rank, first_slot + i] = (gradients_RK[rank, first_slot + i] + gradient) % PRIME
                gradients[rank] = gradients[rank] * weights_RK[rank, first_slot + i] % PRIME
    found = {int(layer): int(gradients_RK[place]) for place, layer in np.ndenumerate(layout.layer_order) if layer >= 0}
    assert [found[layer] for layer in range(layout.num_layers)] == expected
