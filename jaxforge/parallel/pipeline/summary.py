"""A pipeline in words: which rank holds what, and what the schedule costs."""

from jaxforge.parallel.pipeline.layout import PipelineLayout
from jaxforge.parallel.pipeline.schedule import Schedule, make_schedule
from jaxforge.words import counted


def schedule_of(layout: PipelineLayout, num_microbatches: int) -> Schedule:
    """The schedule of a step with so many microbatches on each data parallel rank."""
    return make_schedule(layout.pipeline_size, layout.virtual_stages, num_microbatches)


def describe_sizes(layout: PipelineLayout, vocabulary_is_over_stages: bool) -> str:
    """`PP 4`, or `PP 4 x 2 virtual stages, vocabulary over all ranks`."""
    virtual = f" x {layout.virtual_stages} virtual stages" if layout.virtual_stages > 1 else ""
    return f"PP {layout.pipeline_size}{virtual}" + (", vocabulary over all ranks" if vocabulary_is_over_stages else "")


def describe_pipeline(layout: PipelineLayout, num_microbatches: int) -> str:
    """Lines for a person to read: the layout, the schedule, and a hint where there are few microbatches."""
    schedule = schedule_of(layout, num_microbatches)
    lines = [layout.describe(), describe_schedule(schedule.num_ticks, schedule.bubble_fraction, in_flight(schedule))]
    if num_microbatches < layout.pipeline_size:
        enough = schedule_of(layout, layout.pipeline_size)
        lines.append(
            f"hint: {counted(num_microbatches, 'microbatch', 'es')} can't keep {layout.pipeline_size} pipeline ranks"
            f" busy; {layout.pipeline_size} would have a bubble of {enough.bubble_fraction:.1%}: raise"
            " train.global_batch_size or lower train.micro_batch_size"
        )
    return "\n".join(lines)


def describe_schedule(ticks: int, bubble_fraction: float, max_chunks_in_flight: int) -> str:
    return (
        f"schedule: {counted(ticks, 'tick')}, bubble {bubble_fraction:.1%}, at most"
        f" {counted(max_chunks_in_flight, 'chunk')} in flight on a rank"
    )


def in_flight(schedule: Schedule) -> int:
    """The most chunks of any rank between their forward and their backward at a time."""
    return int(schedule.max_chunks_in_flight.max())
