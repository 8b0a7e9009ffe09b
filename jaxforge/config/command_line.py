"""What the command lines share: --config with overrides, and errors as one message with exit code 2."""

import argparse
import sys
from collections.abc import Callable, Sequence

from jaxforge.config.errors import ConfigError

CONFIG_HELP = "a recipe, such as configs/demo_vlm.py; --config.GROUP.FIELD=VALUE overrides one of its fields"


class Parser(argparse.ArgumentParser):
    """Reports a wrong command line as a ConfigError."""

    def error(self, message: str):
        raise ConfigError(f"{message}; {self.prog} --help lists the flags")


def parser(prog: str, description: str) -> argparse.ArgumentParser:
    """A parser that knows --config; commands add their own flags, and parse with `parse`."""
    made = Parser(prog=f"python -m jaxforge.{prog}", description=description, allow_abbrev=False)
    made.add_argument("--config", required=True, metavar="RECIPE", help=CONFIG_HELP)
    return made


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The flags, and the overrides among them.  Raises ConfigError for a flag that nobody knows."""
    overrides = [word for word in argv if word.startswith("--config.")]
    return parser.parse_args([word for word in argv if not word.startswith("--config.")]), overrides


def run(main: Callable[[Sequence[str]], int | None]) -> None:
    """Runs a command and exits: 0, or 2 with the message of a ConfigError, without a traceback."""
    try:
        sys.exit(main(sys.argv[1:]) or 0)
    except ConfigError as error:
        print(f"config error: {error}", file=sys.stderr)
        sys.exit(2)
