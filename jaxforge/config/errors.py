"""The error a user's mistake raises."""


class ConfigError(ValueError):
    """A setting, file or command line the user can correct.

    The message names the field, its value, the rule it breaks and a way out. Command lines print it without a traceback
    and exit with code 2.
    """
