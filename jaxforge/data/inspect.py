"""Shows what a run will read: python -m jaxforge.data.inspect --config=RECIPE [--samples=4] [--picture=FILE.png]

Prints a summary of the data and the first documents as the model gets them: what is learnt, special tokens, images,
positions.  Draws the same documents with their images, and the first rows, to data_inspect.png.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxforge.config import Config, ConfigError, command_line, load_config, resolve, validate
from jaxforge.config.derived import data_source
from jaxforge.data.balance import balanced_order
from jaxforge.data.digits import PIXEL_MEAN, PIXEL_STD, DigitsSource
from jaxforge.data.files_source import FilesSource, checkpoint_folder
from jaxforge.data.inspect_picture import draw_inspection
from jaxforge.data.lengths import cache_folder, describe_skipped
from jaxforge.data.packing import pack_row
from jaxforge.data.row_view import DocumentView, PixelScale, document_views
from jaxforge.data.sources import RowSource, train_source
from jaxforge.data.tokenizer import ByteTokenizer
from jaxforge.words import counted

_ROWS_SHOWN = 8
_MOST_CHARACTERS = 1600
_STYLES = {"masked": "dim", "target": "bold green", "visual": "yellow"}


def main(argv: Sequence[str]) -> int:
    parser = command_line.parser("data.inspect", "Shows the data that a run will train on, as the model gets them.")
    parser.add_argument("--samples", type=int, default=4, metavar="N", help="documents to show; 4 by default")
    parser.add_argument("--picture", default="data_inspect.png", metavar="FILE.png", help="where to draw them")
    flags, overrides = command_line.parse(parser, argv)
    if flags.samples < 1:
        raise ConfigError(f"--samples={flags.samples} must be at least 1")
    if Path(flags.picture).suffix != ".png":
        raise ConfigError(f"--picture={flags.picture} must end in .png")
    config = resolve(load_config(flags.config, overrides))
    # the smallest run of this layout, on the machine that it is for: this one needs no such devices
    is_simulated = config.train.simulated_devices is not None
    smallest = config.parallel.tensor_model_parallel_size * config.parallel.pipeline_model_parallel_size
    validate(config, smallest, "cpu" if is_simulated else "gpu")
    jax.config.update("jax_platforms", "cpu")
    inspect(config, flags.samples, Path(flags.picture), Console(highlight=False))
    return 0


def inspect(config: Config, num_documents: int, picture: Path, console: Console) -> None:
    """Prints and draws the data of a config."""
    source = train_source(config)
    if isinstance(source, FilesSource):
        _show_files(source, config, console)
    rows = [_read_row(source, index) for index in range(_ROWS_SHOWN)]
    _show_rows([row for row, _ in rows], console)
    decode, scale = _decoder(source, config), _pixel_scale(config)
    documents: list[tuple[str, DocumentView]] = []
    for index, (row, places) in enumerate(rows):
        for number, view in enumerate(document_views(row, decode, config.model.encoder, scale)):
            where = f"{places[number]}, row {index}" if places else f"row {index}"
            documents.append((f"{where}: {_describe(view)}", view))
    documents = documents[:num_documents]
    for heading, view in documents:
        _show_document(heading, view, console)
    shown = [(f"row {index}: {_describe_row(row)}", row) for index, (row, _) in enumerate(rows)]
    title = f"{data_source(config)}: the first {len(documents)} documents and {len(rows)} rows"
    draw_inspection(title, documents, shown, picture)
    console.print(f"drawn in {picture}", markup=False)


def _read_row(source: RowSource, index: int) -> tuple[Mapping[str, np.ndarray], list[str]]:
    """A row, and file and line of each of its documents where they come from files."""
    if not isinstance(source, FilesSource):
        return source.row(index), []
    documents = source.documents(index)
    places = [source.files.where(sample) for sample, _ in documents]
    return pack_row([document for _, document in documents], source.row_format), places


def _show_files(source: FilesSource, config: Config, console: Console) -> None:
    """What was found in the files, and how it was packed."""
    lengths, plan, room = source.lengths, source.epoch_plan(0), source.row_format
    table = Table(title=", ".join(source.files.paths), title_justify="left", show_header=False)
    table.add_row("files", f"{len(source.files.files):,}")
    table.add_row("samples", f"{len(source.files):,}")
    skipped = sum(source.skipped.values())
    table.add_row("skipped", f"{skipped:,}: {describe_skipped(source.skipped)}" if skipped else "none")
    table.add_row("documents", f"{len(lengths):,}")
    table.add_row("tokens", f"{int(lengths.tokens_N.sum()):,}")
    table.add_row("tokens of a document", _spread(lengths.tokens_N))
    seeing = lengths.patches_N[lengths.patches_N > 0]
    if room.max_patches:
        table.add_row("with images", f"{len(seeing):,} documents")
    if len(seeing):
        table.add_row("patches of those", _spread(seeing))
    table.add_row("rows in an epoch", f"{len(plan):,} of {len(plan.documents):,} documents")
    fill = f"{plan.fill(lengths.tokens_N, room.seq_length):.1%} of the tokens"
    if room.max_patches:
        fill += f", {lengths.patches_N[plan.documents].sum() / (len(plan) * room.max_patches):.1%} of the patches"
    table.add_row("fill", fill)
    table.add_row("balance", _balance(source, config))
    table.add_row("lengths cached in", str(cache_folder(config.data)))
    console.print(table)
    for skip in sorted(lengths.examples, key=lambda skip: skip.kind):
        console.print(f"skipped, {skip.kind}: {skip.where}: {skip.message}", markup=False)


def _spread(values_N: np.ndarray) -> str:
    """A distribution in words."""
    low, middle, high = np.percentile(values_N, [10, 50, 90], method="inverted_cdf").tolist()
    return f"a tenth up to {low:,}, half up to {middle:,}, nine tenths up to {high:,}, at most {int(values_N.max()):,}"


def _balance(source: FilesSource, config: Config) -> str:
    """How much more than the mean the most loaded rank of a step has to do, on up to 8 ranks."""
    if config.model.decoder.hidden_dropout:
        return "rows keep their order, as the masks of model.decoder.hidden_dropout follow it"
    train = config.train
    chunks = train.global_batch_size // train.micro_batch_size
    # a rank that has a row or two alone leaves nothing to deal
    ranks = max((ranks for ranks in (2, 4, 8) if chunks % ranks == 0 and chunks >= 4 * ranks), default=0)
    if not ranks:
        return "too few rows in a step to deal them over ranks"
    microbatches = chunks // ranks
    steps = max(1, min(50, len(source.epoch_plan(0)) // train.global_batch_size))
    excess = {"in order": 0.0, "balanced": 0.0}
    for step in range(steps):
        costs_R = source.costs(step * train.global_batch_size, train.global_batch_size)
        order = balanced_order(costs_R, microbatches, ranks, train.micro_batch_size)
        for name, rows in (("in order", costs_R), ("balanced", costs_R[order])):
            loads = rows.reshape(microbatches, ranks, -1).sum(axis=(0, 2))
            excess[name] += (loads.max() / loads.mean() - 1) / steps
    return (
        f"on {ranks} ranks the most loaded does {excess['balanced']:.1%} more than the mean"
        f" ({excess['in order']:.1%} in the order of the plan)"
    )


def _show_rows(rows: Sequence[Mapping[str, np.ndarray]], console: Console) -> None:
    for index, row in enumerate(rows):
        console.print(f"row {index}: {_describe_row(row)}", markup=False)


def _describe_row(row: Mapping[str, np.ndarray]) -> str:
    used = row["segment_ids"] > 0
    text = f"{int(row['segment_ids'].max())} documents, {used.mean():.1%} of {len(used):,} tokens"
    if "patch_segments" in row:
        patches = row["patch_segments"] > 0
        text += f", {patches.mean():.1%} of {len(patches):,} patches"
    return text


def _describe(view: DocumentView) -> str:
    time, height, width = view.last_positions
    positions = f"positions to {time}"
    if view.images:
        images = counted(len(view.images), "image")
        return f"{view.num_tokens} tokens, {view.num_targets} learnt, {images}, {positions}, {height}, {width}"
    return f"{view.num_tokens} tokens, {view.num_targets} learnt, {positions}"


def _show_document(heading: str, view: DocumentView, console: Console) -> None:
    """The text with what is learnt in green; in a file, which has no colours, in double brackets."""
    console.print(Text(f"── {heading}", style="bold"), soft_wrap=not console.is_terminal)
    text = Text()
    for span in view.spans:
        shown = span.text
        if len(shown) > _MOST_CHARACTERS:
            half = _MOST_CHARACTERS // 2
            shown = f"{shown[:half]} ... {len(shown) - 2 * half:,} characters ... {shown[-half:]}"
        if span.kind == "target" and not console.is_terminal:
            shown = f"⟦{shown}⟧"
        text.append(shown, style=_STYLES[span.kind])
    console.print(text, soft_wrap=not console.is_terminal)


def _decoder(source: RowSource, config: Config) -> Callable[[Sequence[int]], str]:
    """Tokens to text; random tokens have none, and are shown as numbers."""
    if isinstance(source, FilesSource):
        from jaxforge.data.hf_tokenizer import HFTokenizer

        folder = config.data.tokenizer or config.checkpoint.init_from_hf
        assert folder is not None  # the source could not have been made
        return HFTokenizer(folder).decode
    if isinstance(source, DigitsSource):
        return _digits_text
    return lambda tokens: "".join(f"{token} " for token in tokens)


def _digits_text(tokens: Sequence[int]) -> str:
    """Bytes as text, special tokens by their names."""
    tokenizer = ByteTokenizer()
    names = {getattr(tokenizer, name): f"<{name}>" for name in ("pad", "image", "question", "answer", "end")}
    return "".join(names.get(token) or tokenizer.decode([token]) for token in tokens)


def _pixel_scale(config: Config) -> PixelScale | None:
    encoder = config.model.encoder
    if encoder is None:
        return None
    match data_source(config):
        case "files":
            from jaxforge.data.image_rules import image_rule

            rule = image_rule(config, checkpoint_folder(config))
            return PixelScale(rule.mean, rule.std)
        case "digits":
            return PixelScale((PIXEL_MEAN,), (PIXEL_STD,))
        case _:
            return PixelScale((0.5,), (0.5,))  # random from -1 to 1


if __name__ == "__main__":
    command_line.run(main)
