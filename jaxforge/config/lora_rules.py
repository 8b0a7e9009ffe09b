"""Rules on the adapters: each yields a message for each way in which the config breaks it.

Whether the patterns find projections, and whether those are wide enough for the rank, is checked where the adapters are
made (`jaxforge.models.lora`), which knows the shapes.
"""

from collections.abc import Iterator

from jaxforge.config.schema import AdapterConfig, Config, LoraConfig

COMPONENTS = ("encoder", "projector", "decoder")


def has_adapters(lora: LoraConfig) -> bool:
    """Whether any component has some: then adapters train, and not the parameters beside them."""
    return any(getattr(lora, component).rank > 0 for component in COMPONENTS)


def adapters_are_possible(config: Config) -> Iterator[str]:
    """A component with adapters exists, its scale is positive, and some projection gets one."""
    for component in COMPONENTS:
        adapter, field = getattr(config.lora, component), f"lora.{component}"
        if adapter.rank < 0:
            yield f"{field}.rank={adapter.rank} must be at least 0; 0 has no adapters"
        if adapter.rank <= 0:
            continue
        if component != "decoder" and config.model.encoder is None:
            yield f"{field}.rank={adapter.rank} needs an encoder, but model.encoder is None; set the rank to 0"
        if adapter.alpha <= 0:
            yield f"{field}.alpha={adapter.alpha} must be above 0; twice the rank is a common choice"
        if not adapter.targets:
            yield f"{field}.targets is empty, so {field}.rank={adapter.rank} would have no effect; set the rank to 0"


def adapter_fields_have_an_effect(config: Config) -> Iterator[str]:
    """What describes adapters is set where there are some."""
    for component in COMPONENTS:
        adapter, field = getattr(config.lora, component), f"lora.{component}"
        for name in ("alpha", "use_rslora", "targets") if adapter.rank == 0 else ():
            value, default = getattr(adapter, name), getattr(AdapterConfig, name)
            if value != default:
                yield (
                    f"{field}.{name}={value} would have no effect with {field}.rank=0; set a rank or leave {name} at"
                    f" {default}"
                )
    if config.lora.train_also and not has_adapters(config.lora):
        yield (
            f"lora.train_also={config.lora.train_also} would have no effect, because no component has adapters and all"
            " parameters train; set a rank such as lora.decoder.rank=16, or leave train_also empty and use"
            " optimizer.freeze"
        )


LORA_RULES = (adapters_are_possible, adapter_fields_have_an_effect)
