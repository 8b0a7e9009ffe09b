"""What the overlap fields do to the schedule of a step compiled for H100: what is computed while something moves."""

import dataclasses
import re

import pytest
from tiny_runs import compiled_step, language_model

from jaxforge.cluster.xla_flags import overlap_options
from jaxforge.config import ConfigError
from jaxforge.config.schema import Config

_COMPUTES = re.compile(r" (fusion|custom-call|dot)\(")


def scheduled(tensor: int = 1, **parallel) -> str:
    config = language_model(tensor, sequence_parallel=tensor > 1)
    config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **parallel))
    hlo = compiled_step(config, f"h100:1x{2 * tensor}").as_text()
    assert hlo is not None
    return hlo


def moves(hlo: str, kind: str) -> list[tuple[bool, int]]:
    """Of each asynchronous collective: whether it stands in a loop, and what is computed between start and done."""
    found = []
    for computation in hlo.split("\n\n"):
        lines = computation.splitlines()
        for number, line in enumerate(lines):
            if start := re.match(rf"\s*%?(\S+) = .* {kind}-start\(", line):
                done = re.compile(rf" {kind}-done\(%?{re.escape(start[1])}\)")
                end = next(i for i in range(number, len(lines)) if done.search(lines[i]))
                between = sum(bool(_COMPUTES.search(line)) for line in lines[number + 1 : end])
                found.append((not lines[0].startswith("ENTRY"), between))
    return found


def test_weights_of_a_layer_are_gathered_while_another_is_computed():
    plain = scheduled(data_parallel_sharding_strategy="optim_grads_params")
    overlapped = scheduled(data_parallel_sharding_strategy="optim_grads_params", overlap_param_gather=True)
    before, after = (
        [between for in_loop, between in moves(hlo, "all-gather") if in_loop] for hlo in (plain, overlapped)
    )
    # without it the first gather of a layer waits for nothing but its own weights' norm
    assert min(before) <= 1
    assert min(after) >= 3
    # the first layer's come before the loops
    assert any(not in_loop for in_loop, _ in moves(overlapped, "all-gather"))


def test_gradients_of_a_layer_are_reduced_while_another_is_computed():
    overlapped = scheduled(data_parallel_sharding_strategy="optim_grads", overlap_grad_reduce=True)
    in_loop = [between for is_inside, between in moves(overlapped, "reduce-scatter") if is_inside]
    assert in_loop and max(in_loop) >= 4


def test_optim_reduces_in_the_backward_pass_of_the_last_microbatch():
    plain, overlapped = (
        scheduled(data_parallel_sharding_strategy="optim", overlap_grad_reduce=overlap) for overlap in (False, True)
    )
    assert not any(is_inside for is_inside, _ in moves(plain, "reduce-scatter"))
    in_loop = [between for is_inside, between in moves(overlapped, "reduce-scatter") if is_inside]
    assert in_loop and max(in_loop) >= 4


def test_products_beside_sequence_parallel_moves_are_cut_into_pieces():
    plain, overlapped = (scheduled(4, tp_comm_overlap=overlap) for overlap in (False, True))
    # pieces go round the tensor group, each while another is multiplied
    pieces = [between for is_inside, between in moves(overlapped, "collective-permute") if is_inside]
    assert len(pieces) - len(moves(plain, "collective-permute")) >= 8
    assert sum(between >= 2 for between in pieces) >= 8


def test_a_compiler_that_is_not_known_to_have_the_options_is_refused():
    config = Config()
    assert overlap_options(config, "gpu", "0.9.0") == {}
    config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, tp_comm_overlap=True))
    with pytest.raises(ConfigError, match=r"tp_comm_overlap=True needs options .* jaxlib 0.9.0 .* use jaxlib 0.11 or"):
        overlap_options(config, "gpu", "0.9.0")
    assert overlap_options(config, "cpu", "0.9.0") == {}
