"""Numbers with their nouns, for what is printed."""


def counted(number: int, noun: str, ending: str = "s") -> str:
    """`1 rank`, `2 ranks`; with the plural's ending `es`, `2 microbatches`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{ending}"
