"""The layout string: `parallel.pipeline_model_parallel_layout`, as Megatron and LoongForge write it.

    E t m L     embedding, decoder layer, MTP layer, loss
    |           ends a stage; || is an empty one
    x*n (..)*n  repeats a symbol or a group; groups nest, and a repeat of a repeat multiplies
    , and white space have no meaning

So "Et*3|(tt|)*29,m|L" has 32 stages: E with three layers, 29 of two layers, one with the MTP layer, one with the loss.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxforge.config.errors import ConfigError
from jaxforge.parallel.pipeline.layout import PipelineLayout
from jaxforge.words import counted

FIELD = "parallel.pipeline_model_parallel_layout"


def parse_layout(text: str, num_layers: int, mtp_num_layers: int, pipeline_size: int) -> PipelineLayout:
    """Reads a layout string.

    Args:
      text: the string, see the module's docstring.
      num_layers, mtp_num_layers: layers of the model; the string must place exactly as many.
      pipeline_size: ranks; the string must have a multiple of as many stages.

    Raises:
      ConfigError: naming the field, with the text, a caret under the character at fault, and what would do.
    """
    symbols = _expand(text)
    refuse = functools.partial(_refusal, text)
    if not symbols:
        raise refuse(0, "is empty", "a layout is at least E, the layers t and L, as EttL")
    _check_ends(symbols, refuse)
    stages = _stages(symbols)
    _check_mtp(symbols, stages, refuse)
    _check_layers(symbols, stages, num_layers, pipeline_size, refuse)
    _check_mtp_count(symbols, mtp_num_layers, refuse)
    _check_empty_stages(text, symbols, refuse)
    _check_stage_count(symbols, len(stages), pipeline_size, refuse)
    counts = [Counter(symbol.kind for symbol in stage) for stage in stages]
    return PipelineLayout(pipeline_size, tuple(count["t"] for count in counts), tuple(count["m"] for count in counts))


class _Repeat(NamedTuple):
    """The outermost repeat that a symbol comes from."""

    position: int  # of its count in the text
    times: int


class _Symbol(NamedTuple):
    kind: str  # one of E t m L |
    position: int  # in the text
    repeat: _Repeat | None = None


_Refuse = Callable[[int, str, str], ConfigError]
_MEANING = {"E": "embedding", "t": "decoder layer", "m": "MTP layer", "L": "loss", "|": "end of a stage"}
# Far beyond any model; keeps a slip such as t*10000000000 from filling the memory.
_MAX_SYMBOLS = 100_000


def _expand(text: str) -> list[_Symbol]:
    """The symbols of a text with all repeats written out."""
    # for each open parenthesis, and for the text itself: its position, and what a following * would repeat
    groups: list[tuple[int, list[list[_Symbol]]]] = [(-1, [])]
    position = 0
    while position < len(text):
        character, here = text[position], position
        position += 1
        items = groups[-1][1]
        if _is_decoration(character):
            continue
        if character in _MEANING:
            items.append([_Symbol(character, here)])
        elif character == "(":
            groups.append((here, []))
        elif character == ")":
            if len(groups) == 1:
                raise _refusal(text, here, "has a ) without its (", "remove it, or open the group with (")
            group = list(itertools.chain.from_iterable(groups.pop()[1]))
            if not group:
                raise _refusal(text, here, "has nothing between ( and )", "remove the pair, or fill it as (tt|)*3")
            groups[-1][1].append(group)
        elif character == "*":
            if not items:
                raise _refusal(text, here, "has nothing before *", "a symbol or a group goes before it, as t*3")
            repeat, position = _read_count(text, here)
            if len(items[-1]) * repeat.times > _MAX_SYMBOLS:
                note = f"a layout has at most {_MAX_SYMBOLS} symbols"
                raise _refusal(text, repeat.position, "repeats too often", note)
            items[-1] = [symbol._replace(repeat=repeat) for symbol in items[-1]] * repeat.times
        else:
            is_word = text.lower().startswith("balance")
            way_out = "did you mean balanced?" if is_word else _which_symbol(character)
            raise _refusal(text, here, f"has an unknown symbol {character!r}", way_out)
    if len(groups) > 1:
        raise _refusal(text, groups[-1][0], "has a ( without its )", "close the group with ), as (tt|)*3")
    return list(itertools.chain.from_iterable(groups[0][1]))


def _read_count(text: str, star: int) -> tuple[_Repeat, int]:
    """The count after the * at `star`, and the position behind it."""
    start = star + 1
    while start < len(text) and _is_decoration(text[start]):
        start += 1
    end = start
    while end < len(text) and text[end] in "0123456789":
        end += 1
    if start == end:
        raise _refusal(text, star, "has a * without a count", "write how often, as t*3")
    digits = text[start:end].lstrip("0")
    if not digits:
        raise _refusal(text, start, "repeats 0 times", "write 1 or more, or leave out what is repeated")
    # what has more digits than the largest count is too much in any case
    count = int(digits[: len(str(_MAX_SYMBOLS)) + 1])
    return _Repeat(start, count), end


def _check_ends(symbols: Sequence[_Symbol], refuse: _Refuse) -> None:
    """E is the first symbol and L the last, and each is there once."""
    for kind, place in (("E", "begin"), ("L", "end")):
        name = f"{_MEANING[kind]} ({kind})"
        held = [symbol for symbol in symbols if symbol.kind == kind]
        if not held:
            end = symbols[0 if kind == "E" else -1]
            raise refuse(end.position, f"has no {name}", f"a layout must {place} with {kind}")
        if len(held) > 1:
            extra = held[1] if kind == "E" else held[0]
            note = f"only one, where the layout must {place}"
            if extra.repeat:
                note += f"; take {kind} out of the repeat"
            raise refuse(extra.position, f"has the {name} {len(held)} times", note)
    if symbols[0].kind != "E":
        raise refuse(symbols[0].position, "does not begin with the embedding (E)", "E goes before this")
    if symbols[-1].kind != "L":
        behind = next(after for symbol, after in itertools.pairwise(symbols) if symbol.kind == "L")
        note = "nothing may follow L" + ("; the last stage needs no |" if symbols[-1].kind == "|" else "")
        raise refuse(behind.position, "does not end with the loss (L)", note)


def _stages(symbols: Sequence[_Symbol]) -> list[list[_Symbol]]:
    stages: list[list[_Symbol]] = [[]]
    for symbol in symbols:
        if symbol.kind == "|":
            stages.append([])
        else:
            stages[-1].append(symbol)
    return stages


def _check_mtp(symbols: Sequence[_Symbol], stages: Sequence[Sequence[_Symbol]], refuse: _Refuse) -> None:
    """MTP layers follow the decoder and share a stage, as they share the last hidden state."""
    kinds = [symbol.kind for symbol in symbols]
    if "m" not in kinds:
        return
    late = next((symbol for symbol in symbols[kinds.index("m") :] if symbol.kind == "t"), None)
    if late:
        raise refuse(late.position, "has a decoder layer (t) after an MTP layer (m)", "all t go before the first m")
    holding = [stage for stage in stages if any(symbol.kind == "m" for symbol in stage)]
    if len(holding) > 1:
        second = next(symbol for symbol in holding[1] if symbol.kind == "m")
        raise refuse(second.position, "splits the MTP layers (m) over stages", "all m go into one stage, as mm|L")


def _check_layers(
    symbols: Sequence[_Symbol],
    stages: Sequence[Sequence[_Symbol]],
    num_layers: int,
    pipeline_size: int,
    refuse: _Refuse,
) -> None:
    """Every decoder layer is placed; a wrong count points at the repeat that places most of them."""
    placed = [symbol for symbol in symbols if symbol.kind == "t"]
    missing = num_layers - len(placed)
    if not missing:
        return
    rule = f"places {counted(len(placed), 'decoder layer')} (t), model.decoder.num_layers is {num_layers}"
    note = _missing(missing, "t")
    repeat = _largest_repeat(placed)
    if repeat is None:
        raise refuse((placed or symbols)[-1].position, rule, note)
    from_repeat = sum(symbol.repeat == repeat for symbol in placed)
    bars = sum(symbol.kind == "|" and symbol.repeat == repeat for symbol in symbols)
    note = f"{counted(from_repeat, 'layer')} from this repeat; {note}"
    more, rest = divmod(missing * repeat.times, from_repeat)
    stages_then = len(stages) + more * (bars // repeat.times)
    if rest == 0 and repeat.times + more > 0 and stages_then % pipeline_size == 0:
        note += f"; *{repeat.times + more} would do"
    raise refuse(repeat.position, rule, note)


def _check_mtp_count(symbols: Sequence[_Symbol], mtp_num_layers: int, refuse: _Refuse) -> None:
    placed = [symbol for symbol in symbols if symbol.kind == "m"]
    missing = mtp_num_layers - len(placed)
    if missing:
        note = _missing(missing, "m") + (" before L" if missing > 0 else "")
        rule = f"places {counted(len(placed), 'MTP layer')} (m), model.decoder.mtp_num_layers is {mtp_num_layers}"
        raise refuse((placed or symbols)[-1].position, rule, note)


def _check_empty_stages(text: str, symbols: Sequence[_Symbol], refuse: _Refuse) -> None:
    """An empty stage is written ||; elsewhere two bars in a row come of a repeat, and are a slip."""
    for bar, following in itertools.pairwise(symbols):
        if bar.kind == following.kind == "|":
            between = text[bar.position + 1 : following.position]
            if following.position <= bar.position or not all(map(_is_decoration, between)):
                note = "this ends a stage that holds nothing; leave out one |, or write || where it shall be empty"
                raise refuse(following.position, "has an empty stage that isn't written ||", note)


def _check_stage_count(symbols: Sequence[_Symbol], num_stages: int, pipeline_size: int, refuse: _Refuse) -> None:
    if num_stages % pipeline_size == 0:
        return
    below = num_stages // pipeline_size * pipeline_size
    fitting = " or ".join(str(number) for number in (below, below + pipeline_size) if number)
    rule = (
        f"has {counted(num_stages, 'stage')}, which parallel.pipeline_model_parallel_size={pipeline_size} does not"
        f" divide; write {fitting} stages"
    )
    bars = [symbol for symbol in symbols if symbol.kind == "|"]
    repeat = _largest_repeat(bars)
    if repeat:
        ended = sum(symbol.repeat == repeat for symbol in bars)
        raise refuse(repeat.position, rule, f"{counted(ended, 'stage')} from this repeat")
    raise refuse(
        (bars or symbols)[-1].position,
        rule,
        f"the last stage, number {num_stages}, begins here" if bars else "one stage",
    )


def _largest_repeat(symbols: Sequence[_Symbol]) -> _Repeat | None:
    """The repeat that most of the symbols come from, the later one of equals."""
    counts = Counter(symbol.repeat for symbol in symbols if symbol.repeat)
    return max(counts, key=lambda repeat: (counts[repeat], repeat.position), default=None)


def _refusal(text: str, position: int, rule: str, note: str) -> ConfigError:
    """The rule, the text in a line, and below it a caret with the note."""
    shown = "".join(" " if character.isspace() else character for character in text)
    return ConfigError(f"{FIELD} {rule}\n  {shown}\n  {' ' * position}^ {note}".rstrip())


def _which_symbol(character: str) -> str:
    symbols = ", ".join(f"{symbol} ({meaning})" for symbol, meaning in _MEANING.items())
    for symbol in _MEANING:
        if character.lower() == symbol.lower():
            return f"write {symbol} for {_MEANING[symbol]}"
    return f"symbols are {symbols}; repeats are t*3 or (tt|)*3"


def _is_decoration(character: str) -> bool:
    return character == "," or character.isspace()


def _missing(number: int, symbol: str) -> str:
    """`2 more t are missing`, or for a negative number `2 t too many`."""
    amount = "one" if abs(number) == 1 else str(abs(number))
    if number < 0:
        return f"{amount} {symbol} too many"
    return f"{amount} more {symbol} {'is' if number == 1 else 'are'} missing"
